"""The Trace of a step that was run, the same record as that of a simulated one."""

from collections.abc import Sequence

import numpy as np
import torch

from penstock.ir import Fact, Kind, Program, Series, StageCosts, Trace, microbatch_of, peer_of, stage_of
from penstock.launch import host_id
from penstock.runtime.executor import ActionTimes
from penstock.runtime.groups import ProcessGroups
from penstock.simulate import memory_curves


def recorded_trace(program: Program, costs: StageCosts, groups: ProcessGroups, times: Sequence[ActionTimes]) -> Trace:
    """Gather the times of all ranks into a Trace, on every rank.

    Memory is that of the costs, at the times of the run. A message counts as arrived when the pass that needed it
    started.
    """
    begin, end = _gathered(program, groups, times)
    sends = np.flatnonzero(program.table.kinds == Kind.SEND)
    codes = program.table.codes[sends]
    makers = program.makers
    source, target, microbatch = stage_of(codes), peer_of(codes), microbatch_of(codes)
    values, gradients = makers[Fact.OUTPUT], makers[Fact.INPUT_GRADIENT]
    user = np.where(source < target, values[target, microbatch], gradients[target, microbatch])
    sent = end[sends]
    arrived = np.maximum(sent, begin[user])
    memory = memory_curves(program, costs, begin, end)
    return Trace(program, Series(begin), Series(end), Series(sent), Series(arrived), memory)


def _gathered(program: Program, groups: ProcessGroups, times: Sequence[ActionTimes]) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends of all actions, rank by rank, on one clock that begins at 0.

    Processes of one host share its clock; those of several hosts count from when all ranks had synchronised.
    """
    lengths = [len(program.table.rank(rank)) for rank in range(program.num_ranks)]
    longest = max(lengths)
    rows, host = [], host_id()
    for each in times:
        each.read()
        # Unused entries repeat the last end, so they are never a minimum.
        unused = [max(each.ends, default=each.began)] * (longest - len(each.ends))
        rows.append([host, each.began, *each.starts, *unused, *each.ends, *unused])
    table = torch.tensor(rows, dtype=torch.float64)
    if not groups.is_local:
        table = groups.gather(table[0])
    is_one_host = bool((table[:, 0] == table[0, 0]).all())
    shift = table[:, 2:].min() if is_one_host else table[:, 1:2]
    shifted = (table[:, 2:] - shift).clamp_min(0.0).numpy()
    starts = np.concatenate([row[:length] for row, length in zip(shifted, lengths, strict=True)])
    ends = np.concatenate([row[longest : longest + length] for row, length in zip(shifted, lengths, strict=True)])
    return starts, np.maximum(starts, ends)
