"""add_transfers: puts a Send and a Recv wherever a stage needs a value that another rank makes.

All ranks are walked once with equal passes (a full backward counts two). A Send follows the action that made its
values; its Recv goes before the first action that the receiving rank starts no earlier than that moment. Sending and
receiving thus happen at one instant of one common time line, so no order of blocking sends can deadlock, and the two
ranks of a pair see their messages in the same sequence. Nothing is sent between stages of one rank.
"""

from dataclasses import dataclass

import numpy as np

from penstock.errors import ScheduleError
from penstock.ir import (
    Cuts,
    Dependencies,
    Fact,
    Kind,
    Makers,
    Orders,
    Program,
    Schedule,
    Seconds,
    StageCosts,
    find_dependencies,
    pack,
    pass_seconds,
    walk_passes,
)
from penstock.passes.base import ScheduleToProgram
from penstock.passes.deadlock import deadlock


@dataclass(frozen=True)
class AddTransfers(ScheduleToProgram):
    """Schedule -> Program with messages over the cuts."""

    cuts: Cuts | None = None
    """which stages read which others; None: each reads the one before it"""
    name = "add_transfers"

    def __call__(self, schedule: Schedule) -> Program:
        table, cuts = schedule.table, self.cuts or Cuts.chain(schedule.num_stages)
        silent = Program(schedule.placement, schedule.num_microbatches, cuts, table)
        passes = table.passes
        links = find_dependencies(passes, Makers(passes, schedule.num_stages, schedule.num_microbatches), cuts)
        _refuse_missing(links)
        units = pass_seconds(table, StageCosts.uniform(schedule.num_stages))
        walked = walk_passes(table, links, units)
        if not walked.finished:
            raise deadlock(silent, walked.blocked)
        crossing = links.where(table.rank_of[links.waiter] != table.rank_of[links.needed])
        # Messages of one moment must stand in the same sequence on every rank.
        sequence = np.argsort(walked.ends[crossing.needed], kind="stable")
        crossing = Dependencies(*(column[sequence] for column in crossing))
        return silent.with_table(_with_messages(silent, crossing, walked.ends - units, walked.ends))


def _refuse_missing(links: Dependencies) -> None:
    if (links.needed < 0).any():
        row = int(np.argmax(links.needed < 0))
        raise ScheduleError(
            f"nothing makes the {Fact(links.fact[row]).name.lower().replace('_', ' ')} that an action needs",
            stage=int(links.source[row]),
            microbatch=int(links.microbatch[row]),
            needed_by_stage=int(links.target[row]),
        )


def _with_messages(program: Program, links: Dependencies, starts: Seconds, ends: Seconds) -> Orders:
    table, ranks = program.table, np.asarray(program.placement.ranks)
    sends = pack(Kind.SEND, links.source, links.microbatch, links.target)
    recvs = pack(Kind.RECV, links.target, links.microbatch, links.source)
    sender, receiver = ranks[links.source], ranks[links.target]
    # Starts never fall along a rank, so keys that count whole steps per rank are sorted over all ranks.
    step = ends.max() + 1.0
    before = np.searchsorted(table.rank_of * step + starts, receiver * step + ends[links.needed])
    return table.insert(
        np.stack((links.needed + 1, before), axis=1).ravel(),
        np.stack((sender, receiver), axis=1).ravel(),
        np.stack((sends, recvs), axis=1).ravel(),
    )
