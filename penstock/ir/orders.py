"""Orders: what each rank does, one after another, held as one array of codes."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ScheduleError
from penstock.ir.action import Action, Kind
from penstock.ir.code import (
    Codes,
    decode,
    encode,
    kind_of,
    microbatch_of,
    pack,
    peer_microbatch_of,
    peer_of,
    stage_of,
)

MAX_ACTIONS = 20_000_000


class Passes(NamedTuple):
    """Every action with a stage, overlapped pairs taken apart; `index` says whose action each one is."""

    index: NDArray[np.int64]  # type: ignore[assignment]
    kind: Codes
    stage: Codes
    microbatch: Codes


class Orders:
    """One order of actions per rank, immutable; reads as a sequence of tuples of actions.

    `codes` holds the orders of all ranks end to end; rank r's are `codes[starts[r]:starts[r + 1]]`. The place of an
    action in `codes` is its *index*, by which the array operations of lowering, proof and simulation refer to it.
    """

    def __init__(self, per_rank: Sequence[Codes]) -> None:
        lengths = [len(codes) for codes in per_rank]
        if not lengths:
            raise ScheduleError("orders need at least one rank")
        if sum(lengths) > MAX_ACTIONS:
            raise ScheduleError("too many actions", actions=sum(lengths), limit=MAX_ACTIONS)
        self.codes: Codes = np.concatenate([np.asarray(codes, dtype=np.int64) for codes in per_rank])
        self.starts: NDArray[np.int64] = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        self.codes.flags.writeable = False
        self.starts.flags.writeable = False

    @classmethod
    def of(cls, per_rank: Iterable[Iterable[Action]]) -> "Orders":
        """Orders of action objects."""
        return cls([encode(actions) for actions in per_rank])

    def rank(self, rank: int) -> Codes:
        """The codes of one rank."""
        return self.codes[self.starts[rank] : self.starts[rank + 1]]

    def select(self, keep: NDArray[np.bool_]) -> "Orders":
        """The same orders without the actions that are not to be kept."""
        return Orders([self.rank(r)[keep[self.starts[r] : self.starts[r + 1]]] for r in range(len(self))])

    def insert(self, before: NDArray[np.int64], ranks: NDArray[np.int64], codes: Codes) -> "Orders":
        """The same orders with further actions, each before the given index of the given rank (its end included).

        Several actions before one index keep the sequence in which they are given.
        """
        sequence = np.argsort(before * len(self) + ranks, kind="stable")
        merged = np.insert(self.codes, before[sequence], codes[sequence])
        lengths = np.diff(self.starts) + np.bincount(ranks, minlength=len(self))
        return Orders(np.split(merged, np.cumsum(lengths)[:-1]))

    @cached_property
    def rank_of(self) -> NDArray[np.int64]:
        """The rank of every index."""
        return np.repeat(np.arange(len(self), dtype=np.int64), np.diff(self.starts))

    @cached_property
    def kinds(self) -> Codes:
        """The kind of every index."""
        return kind_of(self.codes)

    @cached_property
    def passes(self) -> Passes:
        """All actions, with both halves of every overlapped pair."""
        codes, kinds = self.codes, self.kinds
        pairs = np.flatnonzero(kinds == Kind.OVERLAP)
        index = np.arange(len(codes), dtype=np.int64)
        if not len(pairs):
            return Passes(index, kinds, stage_of(codes), microbatch_of(codes))
        halves = codes[pairs]
        halved = np.where(kinds == Kind.OVERLAP, Kind.FORWARD, kinds)
        return Passes(
            np.concatenate((index, pairs)),
            np.concatenate((halved, np.full(len(pairs), Kind.BACKWARD))),
            np.concatenate((stage_of(codes), peer_of(halves))),
            np.concatenate((microbatch_of(codes), peer_microbatch_of(halves))),
        )

    def taken_apart(self, keep: NDArray[np.bool_]) -> "Orders":
        """Orders of the single passes that are to be kept, by their place in `passes`."""
        passes = Passes(*(column[keep] for column in self.passes))
        # Halves of one pair stand in `passes` with the forward first, and so they stay.
        sequence = np.argsort(passes.index, kind="stable")
        codes = pack(passes.kind, passes.stage, passes.microbatch)[sequence] if len(sequence) else passes.kind
        ranks = self.rank_of[passes.index[sequence]]
        return Orders([codes[ranks == rank] for rank in range(len(self))])

    @cached_property
    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """The orders as tuples of action objects."""
        return tuple(decode(self.rank(rank)) for rank in range(len(self)))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, rank: int) -> tuple[Action, ...]:
        return self.actions[rank]

    def __iter__(self) -> Iterator[tuple[Action, ...]]:
        return iter(self.actions)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Orders):
            return NotImplemented
        return np.array_equal(self.starts, other.starts) and np.array_equal(self.codes, other.codes)

    def __hash__(self) -> int:
        return hash((self.codes.tobytes(), self.starts.tobytes()))

    def __repr__(self) -> str:
        shown = [" ".join(map(str, decode(self.rank(r)[:8]))) for r in range(min(len(self), 4))]
        return f"Orders({len(self)} ranks, {len(self.codes)} actions: {' | '.join(shown)} ...)"
