"""Summary: the figures of one trace that tables show and programs read."""

from typing import NamedTuple

import numpy as np

from penstock.ir import Idle, Kind, Trace

_LAST = (Kind.BACKWARD, Kind.WEIGHT_GRAD)


class Summary(NamedTuple):
    """Seconds, shares and bytes of a whole trace; `idle` is each cause's share of all ranks' time."""

    makespan: float
    span: float
    bubble: float
    span_bubble: float
    idle: Idle
    in_flight: float
    """the most microbatches whose activations one rank holds at once; one of v stages of a rank counts 1/v"""
    peak_bytes: int
    """the most that any rank holds"""
    num_messages: int


def summary(trace: Trace) -> Summary:
    """The figures of a trace."""
    capacity = trace.num_ranks * trace.makespan or 1.0
    return Summary(
        makespan=trace.makespan,
        span=trace.span,
        bubble=trace.bubble,
        span_bubble=trace.span_bubble,
        idle=Idle(*(sum(parts) / capacity for parts in zip(*trace.idle, strict=True))),
        in_flight=max(in_flight(trace)),
        peak_bytes=max(trace.peak_bytes(rank) for rank in range(trace.num_ranks)),
        num_messages=len(trace.sent),
    )


def in_flight(trace: Trace) -> tuple[float, ...]:
    """Per rank the most microbatches between their forward and the last of their backward, in units of a whole rank."""
    table, stages = trace.program.table, trace.program.placement.stages
    passes = table.passes
    begun = np.bincount(passes.index[passes.kind == Kind.FORWARD], minlength=len(table.codes))
    ended = np.bincount(passes.index[np.isin(passes.kind, _LAST)], minlength=len(table.codes))
    held = np.cumsum(begun - ended) + ended  # while the action runs; all is given back at the end of a rank
    ranges = zip(table.starts[:-1].tolist(), table.starts[1:].tolist(), stages, strict=True)
    return tuple(float(held[low:high].max(initial=0)) / len(chunks) for low, high, chunks in ranges)
