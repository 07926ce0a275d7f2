"""Traces that the tests of the views look at."""

from dataclasses import replace

import numpy as np

from penstock.ir import Cluster, Schedule, Series, StageCosts, StateBytes, Trace
from penstock.passes import lower
from penstock.schedules import build
from penstock.simulate import simulate

GIB = 2**30
TWO_RANKS = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
VEE = "0F0,0F1,3F0,3B0,3F1,3B1,0B0,0B1\n1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1\n"
PAIR = "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n"


def run(csv: str, costs: StageCosts | None = None, cluster: Cluster | None = None) -> Trace:
    """The simulated trace of a schedule written as CSV."""
    return simulate(lower(Schedule.from_csv(csv)), costs, cluster)


def named(schedule: str, ranks: int, microbatches: int, cluster: Cluster | None = None) -> Trace:
    """The simulated trace of a schedule of the table, with unit costs."""
    return simulate(lower(build(schedule, ranks, microbatches)), None, cluster)


def heavy(csv: str = TWO_RANKS) -> Trace:
    """A trace with bytes: a GiB per activation on top of two of parameters."""
    stages = Schedule.from_csv(csv).num_stages
    ones = (1.0,) * stages
    state = (StateBytes(2 * GIB),) * stages
    return run(csv, StageCosts(ones, ones, ones, activation_bytes=(GIB,) * stages, state=state))


def jittered(trace: Trace, seed: int = 0) -> Trace:
    """The trace as a clock might have recorded it: later and longer by uneven amounts."""
    random = np.random.default_rng(seed)
    factor = 1.0 + 0.05 * random.random()
    noise = 1e-3 * random.random(len(trace.starts))
    later = {name: Series(factor * getattr(trace, name).values + noise) for name in ("starts", "ends")}
    return replace(trace, **later)


def standing_still(trace: Trace) -> Trace:
    """The trace with every action at 0 and of no length."""
    names = ("starts", "ends", "sent", "arrived")
    return replace(trace, **{name: Series(0 * getattr(trace, name).values) for name in names})
