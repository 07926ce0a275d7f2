"""Puts a Send and a Recv wherever a stage needs a value that another rank makes.

All ranks are walked once with equal passes (a full backward counts two). A Send follows the action that made its
values; its Recv goes before the first action that the receiving rank starts no earlier than that moment. Sending and
receiving thus happen at one instant of one common time line, so no order of blocking sends can deadlock, and the two
ranks of a pair see their messages in the same sequence. Nothing is sent between stages of one rank.
"""

from dataclasses import dataclass

import numpy as np

from penstock.errors import ScheduleError
from penstock.ir import Dependencies, Fact, Kind, Program, StageCosts, pack, pass_seconds, walk_passes
from penstock.passes.base import Pass
from penstock.passes.verification import deadlock_error


@dataclass(frozen=True)
class AddTransfers(Pass):
    """A Send and a Recv for every value that crosses ranks; the program has no messages before."""

    name = "add_transfers"

    def __call__(self, program: Program) -> Program:
        table, dependencies = program.table, program.dependencies()
        _check_all_made(dependencies)
        seconds = pass_seconds(table, StageCosts.uniform(program.num_stages))
        walked = walk_passes(table, dependencies, seconds)
        if not walked.finished:
            raise deadlock_error(program, walked.blocked)
        starts, ends = walked.ends - seconds, walked.ends
        crossing = dependencies.where(table.rank_of[dependencies.waiter] != table.rank_of[dependencies.needed])
        # Messages of one moment must have the same sequence on every rank.
        sequence = np.argsort(ends[crossing.needed], kind="stable")
        crossing = Dependencies(*(column[sequence] for column in crossing))
        ranks = np.asarray(program.placement.ranks)
        sends = pack(Kind.SEND, crossing.source, crossing.microbatch, crossing.target)
        recvs = pack(Kind.RECV, crossing.target, crossing.microbatch, crossing.source)
        sender, receiver = ranks[crossing.source], ranks[crossing.target]
        # Starts ascend along a rank, and `step` is longer than any of them, so the keys ascend over all ranks and one
        # search finds the first action of the receiving rank that starts no earlier than the message is sent.
        step = ends.max() + 1.0
        before = np.searchsorted(table.rank_of * step + starts, receiver * step + ends[crossing.needed])
        return program.with_table(
            table.insert(
                np.stack((crossing.needed + 1, before), axis=1).ravel(),
                np.stack((sender, receiver), axis=1).ravel(),
                np.stack((sends, recvs), axis=1).ravel(),
            )
        )


def _check_all_made(dependencies: Dependencies) -> None:
    """Raise ScheduleError if an action needs a value that no action of the schedule makes."""
    if (dependencies.needed < 0).any():
        row = int(np.argmax(dependencies.needed < 0))
        raise ScheduleError(
            f"nothing makes the {Fact(dependencies.fact[row]).name.lower().replace('_', ' ')} that an action needs",
            stage=int(dependencies.source[row]),
            microbatch=int(dependencies.microbatch[row]),
            needed_by_stage=int(dependencies.target[row]),
        )
