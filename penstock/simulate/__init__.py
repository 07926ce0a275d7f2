"""Prediction of a step: Program + StageCosts + Cluster -> Trace.

The files:

    simulation.py     when every pass and message happens
    shared_cores.py   the same if more ranks compute at a time than there are cores
    memory.py         the bytes of each rank over time
"""

from penstock.simulate.memory import memory_curves
from penstock.simulate.simulation import Makespans, simulate
