"""The part of verify that matches messages: every Send has its Recv, needed values travel, pairs agree on the order."""

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ScheduleError
from penstock.ir import Codes, Dependencies, Kind, Program, microbatch_of, peer_of, stage_of
from penstock.passes.deadlock import action_at

Indices = NDArray[np.int64]


class Messages:
    """The messages of a program that its cuts ask for, by their key: where each is sent, received and used.

    A key is (source stage, target stage, microbatch) as one number; `keys` is sorted, all others go with it. `maker` is
    the index of the pass that makes the values, `user` of the one that uses them. `send` and `recv` are -1 if missing.
    """

    def __init__(self, program: Program, links: Dependencies) -> None:
        self._sizes = (program.num_stages, program.num_microbatches)
        rank = program.table.rank_of
        crossing = links.where(rank[links.waiter] != rank[links.needed])
        keys = self._key(crossing.source, crossing.target, crossing.microbatch)
        sequence = np.argsort(keys)
        self.keys: Indices = keys[sequence]
        self.maker: Indices = crossing.needed[sequence]
        self.user: Indices = crossing.waiter[sequence]
        self.send = self._place(program, Kind.SEND)
        self.recv = self._place(program, Kind.RECV)

    def _key(self, source: Codes, target: Codes, microbatch: Codes) -> Indices:
        stages, microbatches = self._sizes
        return (source * stages + target) * microbatches + microbatch

    def _place(self, program: Program, kind: Kind) -> Indices:
        """Per key the index of the program's Send or Recv; unknown and double ones are refused."""
        table = program.table
        index = np.flatnonzero(table.kinds == kind)
        codes = table.codes[index]
        ends = (stage_of(codes), peer_of(codes))
        source, target = ends if kind is Kind.SEND else ends[::-1]
        found = self._key(source, target, microbatch_of(codes))
        place = np.minimum(np.searchsorted(self.keys, found), max(len(self.keys) - 1, 0))
        known = self.keys[place] == found if len(self.keys) else np.zeros(len(found), dtype=np.bool_)
        if not known.all():
            _refuse("a message that no stage on another rank needs", program, int(index[np.argmin(known)]))
        times = np.bincount(place, minlength=len(self.keys))
        if (times > 1).any():
            _refuse("a message that is issued twice", program, int(index[place == int(np.argmax(times))][1]))
        result = np.full(len(self.keys), -1, dtype=np.int64)
        result[place] = index
        return result


def check_messages(program: Program, messages: Messages, links: Dependencies) -> None:
    """Every value that crosses ranks is sent after it is made, and its receive is posted before it is used."""
    for kind, index in (("Send", messages.send), ("Recv", messages.recv)):
        if (index < 0).any():
            row = int(np.argmax(index < 0))
            _refuse(
                f"an action needs a value that has no {kind}",
                program,
                int(messages.user[row]),
                hint="a program read from CSV is taken for a chain of stages: give its cuts, or keep it as JSON",
            )
    if (early := messages.send < messages.maker).any():
        _refuse("a message is sent before its values exist", program, int(messages.send[np.argmax(early)]))
    if (late := messages.recv > messages.user).any():
        _refuse("a message is received after its values are used", program, int(messages.recv[np.argmax(late)]))


def check_pairs(program: Program, messages: Messages) -> None:
    """Both ranks of a pair issue their common messages in the same order."""
    rank = program.table.rank_of
    sender, receiver = rank[messages.send], rank[messages.recv]
    low = np.where(sender < receiver, messages.send, messages.recv)
    high = np.where(sender < receiver, messages.recv, messages.send)
    pair = np.minimum(sender, receiver) * program.num_ranks + np.maximum(sender, receiver)
    sequence = np.argsort(pair * len(rank) + low)
    low, high, pair = low[sequence], high[sequence], pair[sequence]
    crossed = (pair[1:] == pair[:-1]) & (high[1:] < high[:-1])
    if not crossed.any():
        return
    row = int(np.argmax(crossed))
    raise ScheduleError(
        "two ranks issue their messages in different orders, which deadlocks or swaps them on transports without tags",
        ranks=(int(rank[low[row]]), int(rank[high[row]])),
        first=f"{action_at(program, int(low[row]))}, then {action_at(program, int(low[row + 1]))}",
        second=f"{action_at(program, int(high[row + 1]))}, then {action_at(program, int(high[row]))}",
    )


def _refuse(problem: str, program: Program, index: int, hint: str = "") -> None:
    rank = int(program.table.rank_of[index])
    raise ScheduleError(
        problem,
        action=action_at(program, index),
        rank=rank,
        position=index - int(program.table.starts[rank]),
        hint=hint,
    )
