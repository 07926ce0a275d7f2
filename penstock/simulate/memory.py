"""Memory over time: what each rank holds, in bytes, after every change.

A forward takes the stage's activation bytes when it starts. A full backward gives all of them back when it ends; an
input gradient gives back what the weight gradient does not need, and the weight gradient the rest. Where the program
says Free, the last part goes there. A receive takes its message's bytes until the pass that uses them: a forward
keeps them among its activations, a gradient is dropped with the end of the backward.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.ir import Curve, Fact, Kind, Makers, Passes, Program, Series, StageCosts, microbatch_of, peer_of, stage_of

Indices = NDArray[np.int64]
_START, _END = 0, 1


class Changes(NamedTuple):
    """Bytes taken (above 0) or given back, at the start or at the end of the action with index `at`."""

    at: Indices
    side: Indices
    amount: NDArray[np.float64]


def curves(
    program: Program, costs: StageCosts, starts: NDArray[np.float64], ends: NDArray[np.float64]
) -> tuple[Curve, ...]:
    """One curve per rank, beginning with the parameters, gradients and optimizer state that it always holds."""
    passes = program.table.passes
    changes = _joined([_activations(program, costs, passes), _buffers(program, costs, passes)])
    # What is given back at one moment of an action is free before anything is taken there.
    sequence = np.lexsort((changes.amount, changes.side, changes.at))
    index, side, amount = changes.at[sequence], changes.side[sequence], changes.amount[sequence]
    seconds = np.where(side == _START, starts[index], ends[index])
    edges = np.searchsorted(index, program.table.starts)
    return tuple(
        _curve(_base(program, costs, rank), seconds[low:high], amount[low:high])
        for rank, (low, high) in enumerate(pairwise(edges.tolist()))
    )


def _base(program: Program, costs: StageCosts, rank: int) -> int:
    return sum(costs.state[stage].total for stage in program.placement.stages[rank])


def _curve(base: int, seconds: NDArray[np.float64], amount: NDArray[np.float64]) -> Curve:
    """One figure per moment, the last: what follows at once on one rank leaves no time between.

    A dip inside a moment is nothing that lasts. A height that exceeds what is held before and after the moment counts,
    as the bytes must be there, however briefly: a receive buffer larger than the activations that take it over.
    """
    held = base + np.cumsum(amount)
    last = np.flatnonzero(np.diff(seconds, append=np.inf) > 0)
    first = np.concatenate(([0], last[:-1] + 1))[: len(last)]
    highest, after = np.maximum.reduceat(held, first) if len(held) else held, held[last]
    is_peak = highest > np.maximum(np.concatenate(([float(base)], after[:-1]))[: len(last)], after)
    # A moment with a peak has two figures, the peak and what stays.
    moments, figures = np.repeat(seconds[last], 1 + is_peak), np.repeat(after, 1 + is_peak)
    figures[np.flatnonzero(is_peak) + np.arange(is_peak.sum())] = highest[is_peak]
    return Curve(Series(np.concatenate(([0.0], moments))), Series(np.concatenate(([float(base)], figures))))


def _activations(program: Program, costs: StageCosts, passes: Passes) -> Changes:
    kept, late = np.asarray(costs.activation_bytes, float), np.asarray(costs.weight_grad_bytes, float)
    release = _release(program, passes)

    def change(kind: Kind, side: int, amount: NDArray[np.float64], delayed: bool) -> Changes:
        chosen = passes.kind == kind
        index = passes.index[chosen]
        if delayed:
            index = release[passes.stage[chosen], passes.microbatch[chosen]]
        return Changes(index, np.full(len(index), side), amount[passes.stage[chosen]])

    return _joined(
        [
            change(Kind.FORWARD, _START, kept, False),
            change(Kind.INPUT_GRAD, _END, late - kept, False),
            change(Kind.WEIGHT_GRAD, _END, -late, True),
            change(Kind.BACKWARD, _END, -kept, True),
        ]
    )


def _release(program: Program, passes: Passes) -> Indices:
    """Per (stage, microbatch) the index at whose end nothing is held any more."""
    release = Makers(passes, program.num_stages, program.num_microbatches)[Fact.WEIGHT_GRADIENT].copy()
    freed = passes.kind == Kind.FREE
    release[passes.stage[freed], passes.microbatch[freed]] = passes.index[freed]
    return release


def _buffers(program: Program, costs: StageCosts, passes: Passes) -> Changes:
    table = program.table
    recv = np.flatnonzero(table.kinds == Kind.RECV)
    codes = table.codes[recv]
    stage, peer, microbatch = stage_of(codes), peer_of(codes), microbatch_of(codes)
    makers = Makers(passes, program.num_stages, program.num_microbatches)
    is_value = stage > peer
    user = np.where(is_value, makers[Fact.OUTPUT][stage, microbatch], makers[Fact.INPUT_GRADIENT][stage, microbatch])
    sizes = costs.message_bytes(peer, stage)
    taken = Changes(recv, np.full(len(recv), _START), sizes)
    given = Changes(user, np.where(is_value, _START, _END), -sizes)
    return _joined([taken, given])


def _joined(parts: list[Changes]) -> Changes:
    return Changes(*(np.concatenate(column) for column in zip(*parts, strict=True)))
