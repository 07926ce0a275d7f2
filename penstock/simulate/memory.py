"""The memory of each rank over time, in bytes.

A forward allocates the stage's activation bytes when it starts. A full backward frees all of them when it ends; an
input gradient frees what the weight gradient does not need, and the weight gradient frees the rest. If the program has
a Free, the last part is freed there. A forward without a backward, as in an evaluation, keeps nothing: its activations
are freed when it ends, or at its Free. A receive allocates the bytes of its message until the pass that uses them: a
forward keeps them among its activations, a gradient is freed at the end of the backward.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from penstock.ir import Curve, Fact, Floats, Ints, Kind, Program, Series, StageCosts, microbatch_of, peer_of, stage_of

_START, _END = 0, 1


class Changes(NamedTuple):
    """Bytes allocated (above 0) or freed at the start or at the end of the action with index `at`."""

    at: Ints
    side: Ints
    amount: Floats


def memory_curves(program: Program, costs: StageCosts, starts: Floats, ends: Floats) -> tuple[Curve, ...]:
    """One curve per rank, which starts at the parameters, gradients and optimizer state that the rank always holds."""
    changes = _join([_activations(program, costs), _buffers(program, costs)])
    # At one moment of an action, frees go before allocations.
    sequence = np.lexsort((changes.amount, changes.side, changes.at))
    index, side, amount = changes.at[sequence], changes.side[sequence], changes.amount[sequence]
    seconds = np.where(side == _START, starts[index], ends[index])
    edges = np.searchsorted(index, program.table.starts)
    return tuple(
        _curve(sum(costs.state[stage].total for stage in stages), seconds[low:high], amount[low:high])
        for stages, (low, high) in zip(program.placement.stages, pairwise(edges.tolist()), strict=True)
    )


def _curve(base: int, seconds: Floats, amount: Floats) -> Curve:
    """The bytes after each moment, starting at `base`.

    Changes of one moment take no time, so a dip between them is left out. A peak above the bytes before and after the
    moment is kept, because the bytes must be available, however briefly: for instance a receive buffer that is larger
    than the activations that take it over.
    """
    held = base + np.cumsum(amount)
    last = np.flatnonzero(np.diff(seconds, append=np.inf) > 0)
    first = np.concatenate(([0], last[:-1] + 1))[: len(last)]
    highest, after = np.maximum.reduceat(held, first) if len(held) else held, held[last]
    is_peak = highest > np.maximum(np.concatenate(([float(base)], after[:-1]))[: len(last)], after)
    # A moment with a peak has two entries, the peak and the bytes after it.
    moments, entries = np.repeat(seconds[last], 1 + is_peak), np.repeat(after, 1 + is_peak)
    entries[np.flatnonzero(is_peak) + np.arange(is_peak.sum())] = highest[is_peak]
    return Curve(Series(np.concatenate(([0.0], moments))), Series(np.concatenate(([float(base)], entries))))


def _activations(program: Program, costs: StageCosts) -> Changes:
    """The bytes that passes keep, and those that they free."""
    passes, shape = program.table.passes, (costs.num_stages, program.num_microbatches)
    # Per (stage, microbatch) the index at whose end everything is freed: its Free if there is one, else its last pass.
    facts = (Fact.OUTPUT, Fact.INPUT_GRADIENT, Fact.WEIGHT_GRADIENT)
    outputs, input_gradients, weight_gradients = (program.makers[fact] for fact in facts)
    is_forward_only = (outputs >= 0) & (input_gradients < 0) & (weight_gradients < 0)
    release = np.where(is_forward_only, outputs, weight_gradients)
    freed = passes.kind == Kind.FREE
    release[passes.stage[freed], passes.microbatch[freed]] = passes.index[freed]

    def change(kind: Kind, side: int, at_release: bool = False) -> Changes:
        amount = np.broadcast_to(costs.allocated(kind), shape)
        chosen = passes.kind == kind
        index = passes.index[chosen]
        if at_release:
            index = release[passes.stage[chosen], passes.microbatch[chosen]]
        return Changes(index, np.full(len(index), side), amount[passes.stage[chosen], passes.microbatch[chosen]])

    kept = np.broadcast_to(costs.allocated(Kind.FORWARD), shape)[is_forward_only]
    return _join(
        [
            change(Kind.FORWARD, _START),
            Changes(release[is_forward_only], np.full(len(kept), _END), -kept),
            change(Kind.INPUT_GRAD, _END),
            change(Kind.WEIGHT_GRAD, _END, at_release=True),
            change(Kind.BACKWARD, _END, at_release=True),
        ]
    )


def _buffers(program: Program, costs: StageCosts) -> Changes:
    """The bytes of received messages, until the pass that uses them."""
    table = program.table
    recv = np.flatnonzero(table.kinds == Kind.RECV)
    codes = table.codes[recv]
    stage, peer, microbatch = stage_of(codes), peer_of(codes), microbatch_of(codes)
    user, sizes = program.makers.users(peer, stage, microbatch), costs.message_bytes(peer, stage)
    allocated = Changes(recv, np.full(len(recv), _START), sizes)
    freed = Changes(user, np.where(stage > peer, _START, _END), -sizes)
    return _join([allocated, freed])


def _join(parts: list[Changes]) -> Changes:
    return Changes(*(np.concatenate(column) for column in zip(*parts, strict=True)))
