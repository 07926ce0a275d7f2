"""Posts each receive earlier, by a bounded number of passes, so that its sender need not wait.

A receive never moves above a Send to the same rank: the two ranks of a pair keep one common sequence of messages, as
transports without tags require. It needs no value, so moving it up can block no rank; its buffer lives that much
longer.
"""

from dataclasses import dataclass

import numpy as np

from penstock.errors import ScheduleError
from penstock.ir import COMPUTE_KINDS, Codes, Ints, Kind, Program, as_int, peer_of
from penstock.passes.base import Pass


@dataclass(frozen=True)
class HoistReceives(Pass):
    """Recv moves up over at most `ahead` compute actions."""

    ahead: int = 2
    """how many passes of its rank a receive may be moved up"""
    name = "hoist_receives"

    def __post_init__(self) -> None:
        ahead = as_int(self.ahead)
        if ahead is None or ahead < 0:
            raise ScheduleError("ahead must be a whole number, 0 or more", ahead=repr(self.ahead))

    def __call__(self, program: Program) -> Program:
        table = program.table
        recvs = np.flatnonzero(table.kinds == Kind.RECV)
        before = np.maximum(_passes_ahead(program, recvs, self.ahead), _after_last_send(program, recvs))
        stays = np.ones(len(table.codes), dtype=np.bool_)
        stays[recvs] = False
        # Indices shift down by the number of receives removed before them.
        shifted = before - np.searchsorted(recvs, before)
        return program.with_table(table.select(stays).insert(shifted, table.rank_of[recvs], table.codes[recvs]))


def _passes_ahead(program: Program, recvs: Codes, ahead: int) -> Ints:
    """The index of the action `ahead` compute actions above each receive, or the start of its rank."""
    table = program.table
    computes = np.flatnonzero(np.isin(table.kinds, COMPUTE_KINDS))
    first = table.starts[table.rank_of[recvs]]
    place = np.searchsorted(computes, recvs) - ahead
    lowest = np.searchsorted(computes, first)
    above = np.where(place < lowest, first, computes[np.maximum(place, lowest).clip(max=len(computes) - 1)])
    return np.minimum(above, recvs)


def _after_last_send(program: Program, recvs: Codes) -> Ints:
    """The index after the last Send, above each receive, from its rank to the rank it receives from."""
    table, ranks = program.table, np.asarray(program.placement.ranks)
    messages = np.flatnonzero((table.kinds == Kind.SEND) | (table.kinds == Kind.RECV))
    pair = table.rank_of[messages] * program.num_ranks + ranks[peer_of(table.codes[messages])]
    by_pair = np.argsort(pair, kind="stable")
    messages, pair = messages[by_pair], pair[by_pair]
    is_send = table.kinds[messages] == Kind.SEND
    opens = np.concatenate(([True], pair[1:] != pair[:-1]))
    # Running maximum of "index after this Send", restarted for every pair by an offset that grows from pair to pair.
    group = np.cumsum(opens) * (len(table.codes) + 1)
    last = np.maximum.accumulate(np.where(is_send, messages + 1, 0) + group) - group
    found = np.zeros(len(table.codes), dtype=np.int64)
    found[messages] = last
    return np.maximum(found[recvs], table.starts[table.rank_of[recvs]])
