"""Timing: when the passes of a schedule end if messages take no time."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.ir.action import Kind
from penstock.ir.code import peer_of, stage_of
from penstock.ir.costs import StageCosts
from penstock.ir.cuts import Cuts
from penstock.ir.dependence import Dependencies, Makers, find_dependencies
from penstock.ir.orders import Orders
from penstock.ir.program_walk import Needs, Walk, walk
from penstock.ir.schedule import Schedule

Seconds = NDArray[np.float64]


def pass_seconds(table: Orders, costs: StageCosts, overlap: float = 0.0) -> Seconds:
    """Seconds of every action; 0 for what is no compute. An overlapped pair hides a share of its shorter half."""
    by_kind = np.zeros((len(Kind), costs.num_stages))
    by_kind[Kind.FORWARD], by_kind[Kind.BACKWARD] = costs.forward, costs.backward
    by_kind[Kind.INPUT_GRAD], by_kind[Kind.WEIGHT_GRAD] = costs.input_grad, costs.weight_grad
    seconds = by_kind[table.kinds, stage_of(table.codes)]
    pairs = table.kinds == Kind.OVERLAP
    forward = by_kind[Kind.FORWARD, stage_of(table.codes[pairs])]
    backward = by_kind[Kind.BACKWARD, peer_of(table.codes[pairs])]
    seconds[pairs] = forward + backward - overlap * np.minimum(forward, backward)
    return np.asarray(seconds)


def waits(table: Orders, links: Dependencies) -> Needs:
    """Per action what it has to wait for: what other ranks make, and what its own rank makes only later."""
    rank = table.rank_of
    real = links.where((rank[links.waiter] != rank[links.needed]) | (links.needed >= links.waiter))
    return Needs.of(len(table.codes), real.waiter, real.needed)


def walk_passes(table: Orders, links: Dependencies, seconds: Seconds | None = None) -> Walk:
    """Run compute actions as soon as their order and their dependencies allow."""
    return walk(table.starts.tolist(), waits(table, links), None if seconds is None else seconds.tolist())


def chain_dependencies(schedule: Schedule) -> Dependencies:
    """All dependencies of a schedule over a chain of stages."""
    passes = schedule.table.passes
    makers = Makers(passes, schedule.num_stages, schedule.num_microbatches)
    return find_dependencies(passes, makers, Cuts.chain(schedule.num_stages))


class Length(NamedTuple):
    """Both measures of a step: its makespan, and the longest time from first start to last end on one rank."""

    makespan: float
    span: float


def schedule_length(schedule: Schedule, costs: StageCosts) -> Length:
    """How long one step of a schedule takes over a chain of stages."""
    table = schedule.table
    seconds = pass_seconds(table, costs)
    ends = walk_passes(table, chain_dependencies(schedule), seconds).ends
    first, last = table.starts[:-1], table.starts[1:] - 1
    return Length(float(ends.max()), float((ends[last] - ends[first] + seconds[first]).max()))
