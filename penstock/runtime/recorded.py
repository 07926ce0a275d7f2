"""Recorded: the Trace of a step that was run, the same noun as a predicted one."""

import numpy as np
from numpy.typing import NDArray

from penstock.ir import Codes, Fact, Kind, Makers, Program, Series, StageCosts, Trace, microbatch_of, peer_of, stage_of
from penstock.simulate import curves


def trace_of(program: Program, costs: StageCosts, starts: list[float], ends: list[float]) -> Trace:
    """A Trace from when every action ran. Bytes are those of the plan, at the times of the run.

    A message counts as arrived when the pass that needed it could start.
    """
    begin, end = np.asarray(starts), np.maximum(np.asarray(starts), np.asarray(ends))
    sends = np.flatnonzero(program.table.kinds == Kind.SEND)
    sent, used = end[sends], begin[_users(program, program.table.codes[sends])]
    return Trace(
        program,
        Series(begin),
        Series(end),
        Series(sent),
        Series(np.maximum(sent, used)),
        curves(program, costs, begin, end),
    )


def _users(program: Program, codes: Codes) -> NDArray[np.int64]:
    """The index of the pass for which each message was sent."""
    makers = Makers(program.table.passes, program.num_stages, program.num_microbatches)
    source, target, microbatch = stage_of(codes), peer_of(codes), microbatch_of(codes)
    values, gradients = makers[Fact.OUTPUT], makers[Fact.INPUT_GRADIENT]
    return np.where(source < target, values[target, microbatch], gradients[target, microbatch])
