"""Search algorithms that the partitioners share.

contiguous.py    the best cut of the atoms into runs, one run per stage
limits.py        the least load of the busiest rank, for one run per rank and for two
boundaries.py    runs for several stages per rank: shifts the boundaries between them
ideals.py        all partitions of a graph with few branches
local.py         improves a partition by moving single atoms
multilevel.py    other orders of the atoms, and atoms joined and taken apart again
"""
