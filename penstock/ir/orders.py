"""Orders of actions, one per rank, stored compactly, and the dependencies between their actions.

An action is one 64-bit integer, its *code*: kind, stage, microbatch, peer and peer microbatch in bit fields. The
functions here work on single integers and on numpy arrays, so an order of a million actions is built, matched
and verified with a few array operations. `peer` is the other stage of a message, or the stage of the backward half of
an overlapped pair; `peer_microbatch` is used by overlapped pairs only.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ScheduleError
from penstock.ir.action import (
    PASS_ACTIONS,
    RULES,
    Action,
    Backward,
    ComputeAction,
    Fact,
    Forward,
    Free,
    Kind,
    Message,
    Overlap,
    Recv,
    Reduce,
    Relation,
    Reshard,
    Send,
    Unshard,
)
from penstock.ir.placement import Cuts, StageEdge

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]
Codes: TypeAlias = Ints
MAX_ACTIONS = 20_000_000
Numbers: TypeAlias = "int | NDArray[np.integer]"

# Bit positions and masks of the fields. 13 bits of stage and 16 of microbatch match MAX_STAGES and MAX_MICROBATCHES.
_STAGE, _MICROBATCH, _PEER, _PEER_MICROBATCH = 4, 17, 33, 46
_KIND_MASK, _STAGE_MASK, _MICROBATCH_MASK = 15, 8191, 65535
_COMPUTE = {action.kind: action for action in PASS_ACTIONS.values()}
_MESSAGE: dict[Kind, type[Message]] = {Kind.SEND: Send, Kind.RECV: Recv}
_STAGE_ACTIONS = {kind.kind: kind for kind in (Reduce, Unshard, Reshard)}


def pack(
    kind: Numbers, stage: Numbers, microbatch: Numbers = 0, peer: Numbers = 0, peer_microbatch: Numbers = 0
) -> Codes:
    """Codes from their fields; arrays are broadcast against each other."""
    words = (
        np.asarray(kind, dtype=np.int64)
        | (np.asarray(stage, dtype=np.int64) << _STAGE)
        | (np.asarray(microbatch, dtype=np.int64) << _MICROBATCH)
        | (np.asarray(peer, dtype=np.int64) << _PEER)
        | (np.asarray(peer_microbatch, dtype=np.int64) << _PEER_MICROBATCH)
    )
    return np.atleast_1d(np.asarray(words, dtype=np.int64))


def kind_of(codes: Codes) -> Codes:
    """The kind of each action."""
    return codes & _KIND_MASK


def stage_of(codes: Codes) -> Codes:
    """The stage of each action."""
    return (codes >> _STAGE) & _STAGE_MASK


def microbatch_of(codes: Codes) -> Codes:
    """The microbatch of each action (0 where it has none)."""
    return (codes >> _MICROBATCH) & _MICROBATCH_MASK


def peer_of(codes: Codes) -> Codes:
    """The other stage of each message, or the stage of the backward half of each overlapped pair."""
    return (codes >> _PEER) & _STAGE_MASK


def peer_microbatch_of(codes: Codes) -> Codes:
    """The microbatch of the backward half of each overlapped pair."""
    return (codes >> _PEER_MICROBATCH) & _MICROBATCH_MASK


def encode(actions: Iterable[Action]) -> Codes:
    """The codes of action objects."""
    return np.fromiter((_encode_one(action) for action in actions), dtype=np.int64)


def decode(codes: Codes) -> tuple[Action, ...]:
    """The action objects of codes; equal codes share one object."""
    return tuple(map(decode_one, codes.tolist()))


def _encode_one(action: Action) -> int:
    if isinstance(action, Overlap):
        back = action.backward
        return int(pack(action.kind, action.stage, action.forward.microbatch, back.stage, back.microbatch)[0])
    microbatch = action.microbatch if isinstance(action, ComputeAction | Message | Free) else 0
    peer = action.peer if isinstance(action, Message) else 0
    return action.kind | action.stage << _STAGE | microbatch << _MICROBATCH | peer << _PEER


@lru_cache(maxsize=1 << 16)
def decode_one(code: int) -> Action:
    """The action object of one code."""
    kind = Kind(code & _KIND_MASK)
    stage, microbatch = (code >> _STAGE) & _STAGE_MASK, (code >> _MICROBATCH) & _MICROBATCH_MASK
    peer = (code >> _PEER) & _STAGE_MASK
    if kind is Kind.OVERLAP:
        backward = Backward(peer, (code >> _PEER_MICROBATCH) & _MICROBATCH_MASK)
        return Overlap(Forward(stage, microbatch), backward)
    if kind in _COMPUTE:
        return _COMPUTE[kind](stage, microbatch)
    if kind in _MESSAGE:
        return _MESSAGE[kind](stage, microbatch, peer)
    if kind is Kind.FREE:
        return Free(stage, microbatch)
    return _STAGE_ACTIONS[kind](stage)


def number_microbatches(codes: Codes) -> Codes:
    """The passes of a rank with their microbatches, found by counting.

    The k-th forward of a stage is that of microbatch k, and so is its k-th backward or input gradient. Its weight
    gradients follow its input gradients. An overlapped pair is a forward of one stage and a backward of another.
    """
    kind, stage = kind_of(codes), stage_of(codes)
    is_pair = kind == Kind.OVERLAP
    is_forward = is_pair | (kind == Kind.FORWARD)
    is_backward = is_pair | (kind == Kind.BACKWARD) | (kind == Kind.INPUT_GRAD)
    back_stage = np.where(is_pair, peer_of(codes), stage)
    forward, backward = np.zeros((2, len(codes)), dtype=np.int64)
    # The forward half of a pair is on `stage`, its backward half on `back_stage`.
    for one in np.unique((stage, back_stage)):
        is_own = stage == one
        chosen = is_forward & is_own
        forward[chosen] = np.arange(int(chosen.sum()))
        chosen = is_backward & (back_stage == one)
        backward[chosen] = np.arange(int(chosen.sum()))
        weights = is_own & (kind == Kind.WEIGHT_GRAD)
        backward[weights] = backward[is_own & (kind == Kind.INPUT_GRAD)][: int(weights.sum())]
    return codes + pack(0, 0, np.where(is_forward, forward, backward), 0, np.where(is_pair, backward, 0))


def first_microbatches(codes: Codes, num_microbatches: int) -> Codes:
    """The actions of the first microbatches; of an overlapped pair, the half that is among them stays."""
    is_pair = kind_of(codes) == Kind.OVERLAP
    has_forward = microbatch_of(codes) < num_microbatches
    has_backward = is_pair & (peer_microbatch_of(codes) < num_microbatches)
    forwards = pack(Kind.FORWARD, stage_of(codes), microbatch_of(codes))
    backwards = pack(Kind.BACKWARD, peer_of(codes), peer_microbatch_of(codes))
    halved = np.where(is_pair & ~has_forward, backwards, np.where(is_pair & ~has_backward, forwards, codes))
    kept: Codes = halved[has_forward | has_backward]
    return kept


class Passes(NamedTuple):
    """Every action as single passes: an overlapped pair gives two rows. `index` is the index of the action."""

    index: Ints  # type: ignore[assignment]
    kind: Codes
    stage: Codes
    microbatch: Codes


class Orders:
    """One order of actions per rank, immutable; reads as a sequence of tuples of actions.

    `codes` holds the orders of all ranks end to end; rank r's are `codes[starts[r]:starts[r + 1]]`. The position of an
    action in `codes` is its *index*, which lowering, verification and simulation use to refer to it.
    """

    def __init__(self, per_rank: Sequence[Codes]) -> None:
        lengths = [len(codes) for codes in per_rank]
        if not lengths:
            raise ScheduleError("orders must have at least one rank")
        if sum(lengths) > MAX_ACTIONS:
            raise ScheduleError("too many actions", actions=sum(lengths), limit=MAX_ACTIONS)
        self.codes: Codes = np.concatenate([np.asarray(codes, dtype=np.int64) for codes in per_rank])
        self.starts: Ints = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        self.codes.flags.writeable = False
        self.starts.flags.writeable = False

    @classmethod
    def of(cls, per_rank: Iterable[Iterable[Action]]) -> "Orders":
        """Orders of action objects."""
        return cls([encode(actions) for actions in per_rank])

    def rank(self, rank: int) -> Codes:
        """The codes of one rank."""
        return self.codes[self.starts[rank] : self.starts[rank + 1]]

    def select(self, keep: Bools) -> "Orders":
        """Orders of the actions where `keep` is true, by index."""
        return Orders([self.rank(r)[keep[self.starts[r] : self.starts[r + 1]]] for r in range(len(self))])

    def insert(self, before: Ints, ranks: Ints, codes: Codes) -> "Orders":
        """Orders with more actions, each inserted before the given index of the given rank (its end included).

        Several actions before one index keep the sequence in which they are given.
        """
        # The end of one rank and the start of the next are the same index, so the rank decides between the two.
        sequence = np.argsort(before * len(self) + ranks, kind="stable")
        merged = np.insert(self.codes, before[sequence], codes[sequence])
        lengths = np.diff(self.starts) + np.bincount(ranks, minlength=len(self))
        return Orders(np.split(merged, np.cumsum(lengths)[:-1]))

    @cached_property
    def rank_of(self) -> Ints:
        """The rank of every index."""
        return np.repeat(np.arange(len(self), dtype=np.int64), np.diff(self.starts))

    @cached_property
    def kinds(self) -> Codes:
        """The kind of every index."""
        return kind_of(self.codes)

    def action(self, index: int) -> Action:
        """The action object at an index."""
        return decode_one(int(self.codes[index]))

    def position(self, index: int) -> int:
        """The position of an index in the order of its rank, counted from 0."""
        return index - int(self.starts[self.rank_of[index]])

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

    def select_passes(self, keep: Bools) -> "Orders":
        """Orders of the single passes where `keep` is true, by row of `passes`."""
        passes = Passes(*(column[keep] for column in self.passes))
        # The sort is stable and `passes` lists the forward half of a pair first, so it stays first.
        sequence = np.argsort(passes.index, kind="stable")
        codes = pack(passes.kind, passes.stage, passes.microbatch)[sequence]
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

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """JSON form of orders: one text of cells per rank."""
        from pydantic_core import core_schema

        from penstock.ir.text import parse_rows

        def parse(rows: list[str]) -> Orders:
            return parse_rows([row.split(" ") if row else [] for row in rows])

        return core_schema.no_info_after_validator_function(
            parse, core_schema.list_schema(core_schema.str_schema(strict=True), strict=True)
        )

    def __repr__(self) -> str:
        shown = [" ".join(map(str, decode(self.rank(r)[:8]))) for r in range(min(len(self), 4))]
        return f"Orders({len(self)} ranks, {len(self.codes)} actions: {' | '.join(shown)} ...)"


# ------------------------------------------------------------------------------------------------ dependencies


class Dependencies(NamedTuple):
    """Pairs (waiter, needed) of indices: the action at `waiter` cannot run before the one at `needed` has ended.

    The stage `target` waits for a fact about the stage `source`. If no action makes the fact, `needed` is -1.
    """

    waiter: Ints
    needed: Ints
    fact: Codes
    source: Codes
    target: Codes
    microbatch: Codes

    def where(self, chosen: Bools) -> "Dependencies":
        """The rows where `chosen` is true."""
        return Dependencies(*(column[chosen] for column in self))


class Makers:
    """The action that makes each fact: `makers[fact][stage, microbatch]` is its index, -1 if there is none."""

    def __init__(self, passes: Passes, num_stages: int, num_microbatches: int) -> None:
        shape = (num_stages, num_microbatches)
        self._index = {fact: np.full(shape, -1, dtype=np.int64) for fact in Fact}
        self._times = {fact: np.zeros(num_stages * num_microbatches, dtype=np.int64) for fact in Fact}
        for kind, rule in RULES.items():
            chosen = passes.kind == kind
            stage, microbatch = passes.stage[chosen], passes.microbatch[chosen]
            for fact in rule.makes:
                self._index[fact][stage, microbatch] = passes.index[chosen]
                self._times[fact] += np.bincount(
                    stage * num_microbatches + microbatch, minlength=num_stages * num_microbatches
                )

    def __getitem__(self, fact: Fact) -> Ints:
        return self._index[fact]

    def users(self, source: Codes, target: Codes, microbatch: Codes) -> Ints:
        """The actions that use messages between stages: values go to a later stage, gradients to an earlier one."""
        outputs, gradients = self[Fact.OUTPUT], self[Fact.INPUT_GRADIENT]
        return np.where(target > source, outputs[target, microbatch], gradients[target, microbatch])

    def times(self, fact: Fact) -> Ints:
        """Number of actions that make each fact, by (stage, microbatch)."""
        return self._times[fact].reshape(self._index[fact].shape)


def find_dependencies(passes: Passes, makers: Makers, cuts: Cuts) -> Dependencies:
    """All dependencies between compute actions, for any cuts."""
    found = []
    for kind, rule in RULES.items():
        for fact, relation in rule.needs:
            chosen = np.flatnonzero(passes.kind == kind)
            source = target = passes.stage[chosen]
            if relation is not Relation.OWN:
                edges = cuts.edges if relation is Relation.PRODUCERS else cuts.gradient_edges
                own_end, far_end = (1, 0) if relation is Relation.PRODUCERS else (0, 1)
                rows, source = _neighbours(target, edges, own_end, far_end, cuts.num_stages)
                chosen, target = chosen[rows], target[rows]
            microbatch = passes.microbatch[chosen]
            facts = np.full(len(chosen), fact, dtype=np.int64)
            needed = makers[fact][source, microbatch]
            found.append((passes.index[chosen], needed, facts, source, target, microbatch))
    return Dependencies(*(np.concatenate(column) for column in zip(*found, strict=True)))


def _neighbours(
    stage: Ints, edges: tuple[StageEdge, ...], own_end: int, far_end: int, num_stages: int
) -> tuple[Ints, Ints]:
    """For each given stage, the stage at the far end of each of its edges: pairs (row of `stage`, other stage).

    `own_end` and `far_end` are the columns of `edges`, 0 for the producer and 1 for the consumer.
    """
    # Edges grouped by their own end; the edges of stage s are table[first[s]:first[s] + degree[s]].
    table = np.asarray(edges, dtype=np.int64).reshape(-1, 2)
    table = table[np.argsort(table[:, own_end], kind="stable")]
    degree = np.bincount(table[:, own_end], minlength=num_stages)
    first = np.concatenate(([0], np.cumsum(degree)))
    counts = degree[stage]
    rows = np.repeat(np.arange(len(stage), dtype=np.int64), counts)
    nth = np.arange(len(rows), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    return rows, table[first[stage[rows]] + nth, far_end]
