"""Receipts: from when on a rank knows that a message it sent has arrived, without asking.

gloo says whether a send is done only to who waits for it, and a wait might block. But a message that the other rank
sent after it had used ours is proof: once that has come in, waiting for our send takes no time, and its memory can go.
"""

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from penstock.ir import Action, ComputeAction, Kind, Message, Overlap, Program

Users = dict[tuple[int, int, bool], int]
"""where a rank waits for the values (False) or the gradients (True) of a stage and microbatch"""


class _Letter(NamedTuple):
    """A message between two ranks: the place where it is sent, and where the other rank waits for it."""

    sent: int
    used: int


def receipts(program: Program, rank: int) -> dict[int, list[int]]:
    """For places in the order of a rank at which it waits: the places of its sends that are done by then."""
    found: dict[int, list[int]] = {}
    users = [_users(order) for order in program.orders]
    for peer in range(program.num_ranks):
        if peer != rank:
            ours, theirs = _letters(program, users, rank, peer), _letters(program, users, peer, rank)
            for send, proof in _proofs(list(ours), list(theirs)):
                found.setdefault(proof, []).append(send)
    return found


def _proofs(ours: list[_Letter], theirs: list[_Letter]) -> Iterator[tuple[int, int]]:
    """Each of our sends with the earliest place at which we use a letter that was sent after ours was used."""
    theirs = sorted(theirs)
    soonest = list(accumulate((answer.used for answer in reversed(theirs)), min))[::-1]
    for letter in ours:
        first = bisect_right(theirs, letter.used, key=lambda answer: answer.sent)
        if first < len(theirs):
            yield letter.sent, soonest[first]


def _letters(
    program: Program, users: list[dict[tuple[int, int, bool], int]], source: int, target: int
) -> Iterator[_Letter]:
    for place, action in enumerate(program.orders[source]):
        if isinstance(action, Message) and action.kind is Kind.SEND and program.placement[action.peer] == target:
            used = users[target].get((action.peer, action.microbatch, action.is_gradient))
            if used is not None:
                yield _Letter(place, used)


def _users(order: tuple[Action, ...]) -> Users:
    """Where a rank waits for the values and the gradients of each (stage, microbatch)."""
    found = {}
    for place, action in enumerate(order):
        if isinstance(action, ComputeAction | Overlap):
            for part in action.parts:
                if part.kind is not Kind.WEIGHT_GRAD:
                    found[part.stage, part.microbatch, part.kind is not Kind.FORWARD] = place
    return found
