"""Profiles of captured models, measured here or estimated for a device, and links between ranks.

MeasuredModel --> measure (timed, calibrated to the unsplit model) or estimate (from arithmetic and bytes) --> Profile

    profiler.py         measure and estimate: the cost of every node, combined into a Profile
    measured_model.py   runs the nodes of a captured model one at a time
    timing.py           times a node, or the unsplit model; the speed of a device
    memory.py           the tensors that a node saves for its backward
    work.py             the arithmetic and memory traffic of operations, for estimates
    identity.py         equal nodes, and the keys of cached profiles; cache.py: their files
    links.py            latency and bandwidth between ranks; the copies of a message in shared memory
"""

from penstock.measure.cache import Cache
from penstock.measure.identity import profile_key
from penstock.measure.links import measure_copies, measure_links
from penstock.measure.measured_model import MeasuredModel
from penstock.measure.memory import AllocationTracker
from penstock.measure.profiler import estimate, measure
from penstock.measure.timing import Clock, device_name, measure_speed
