"""verifier: `verify` compared with an exhaustive search over all interleavings of small programs.

    python -m benchmarks verifier              # complete for the smallest programs, samples of larger ones
    python -m benchmarks.verifier --complete   # also the 705,600 programs of a vee of 2 ranks with split backwards

A program is right if every interleaving of its ranks reaches the end with the right values, under each of three
semantics of messages. The search shares no code with `verify`: a state is the position of each rank. An action that can
run in a state can run in all later ones, and no rank chooses between actions, so all interleavings that cannot continue
end in one state: the search follows one of them (partial-order reduction). `Search(...).succeeds(reduces=False)` visits
every reachable state; a test compares the two.

- rendezvous (gloo): a send waits until its receive is posted
- buffered: a send never waits
- in order (NCCL): neither waits, and the k-th message that one rank of a pair issues meets the k-th of the other

`verify` must accept a program exactly if it is right under rendezvous and in order, and then it is right with buffers
too. Complete enumerations have every order of the passes and messages of every rank, microbatches renumbered in the
order of rank 0. Legal orders are those in which a rank makes a value before it uses or sends it, and posts a receive
before it uses the values; all others can be refused without looking at other ranks.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations, product
from random import Random

from benchmarks.table import Line, Table
from penstock.errors import ScheduleError
from penstock.ir import (
    Action,
    Backward,
    ComputeAction,
    Cuts,
    Forward,
    InputGrad,
    Placement,
    Program,
    Recv,
    Send,
    WeightGrad,
)
from penstock.passes import verify

RENDEZVOUS, BUFFERED, IN_ORDER = SEMANTICS = ("rendezvous", "buffered", "in order")
Order = tuple[Action, ...]
Key = tuple[int, int, int]
"""source stage, target stage and microbatch of a message"""


@dataclass(frozen=True)
class Family:
    """All programs of some ranks, stages and microbatches over a chain of stages, or one with a skip connection."""

    ranks: tuple[int, ...]
    """the rank of every stage"""
    microbatches: int
    backward: str = "B"
    """"B": full backwards; "IW": split ones; "": none"""
    skips: bool = False
    """whether the last stage also reads the first"""

    def __str__(self) -> str:
        passes = {"B": "F B", "IW": "F I W", "": "F"}[self.backward]
        stages = ",".join(map(str, self.ranks))
        return f"{max(self.ranks) + 1} ranks ({stages}), {self.microbatches} mb, {passes}{', skip' * self.skips}"

    @cached_property
    def cuts(self) -> Cuts:
        """The edges between the stages."""
        count = len(self.ranks)
        edges = {(stage, stage + 1) for stage in range(count - 1)}
        return Cuts.of(count, edges | ({(0, count - 1)} if self.skips else set()), set())

    @cached_property
    def actions(self) -> list[list[Action]]:
        """The actions of every rank, in no particular order."""
        actions: list[list[Action]] = [[] for _ in range(max(self.ranks) + 1)]
        for microbatch in range(self.microbatches):
            for stage, rank in enumerate(self.ranks):
                kinds = {"": (), "B": (Backward,), "IW": (InputGrad, WeightGrad)}[self.backward]
                actions[rank] += [kind(stage, microbatch) for kind in (Forward, *kinds)]
            for producer, consumer in self.cuts.edges:
                ways = ((producer, consumer), (consumer, producer)) if self.backward else ((producer, consumer),)
                for source, target in ways:
                    if self.ranks[source] != self.ranks[target]:
                        actions[self.ranks[source]].append(Send(source, microbatch, target))
                        actions[self.ranks[target]].append(Recv(target, microbatch, source))
        return actions

    def before(self, action: Action, other: Action) -> bool:
        """Whether a rank must do one of its actions before another one, by the values that these make and use."""
        if action.microbatch != other.microbatch:  # type: ignore[attr-defined]
            return False
        if isinstance(action, Recv):
            return isinstance(other, ComputeAction) and other.stage == action.stage and self._uses(other, action.peer)
        if isinstance(other, Send):
            return _makes(action, other.stage, other.stage > other.peer)
        if not (isinstance(action, ComputeAction) and isinstance(other, ComputeAction)):
            return False
        if action.stage == other.stage:
            kinds = (Forward, InputGrad, Backward, WeightGrad)
            return kinds.index(type(action)) < kinds.index(type(other))
        return self._uses(other, action.stage) and _makes(action, action.stage, action.stage > other.stage)

    def _uses(self, action: ComputeAction, source: int) -> bool:
        """Whether a pass uses the values, or the gradient, of another stage."""
        edge = (min(source, action.stage), max(source, action.stage))
        if edge not in self.cuts.edges or isinstance(action, WeightGrad):
            return False
        return isinstance(action, Forward) == (source < action.stage)

    def legal_orders(self, rank: int) -> Iterator[Order]:
        """Every order of the actions of a rank in which its own values are made before they are used."""
        actions = self.actions[rank]
        needed = [
            sum(1 << index for index, other in enumerate(actions) if self.before(other, action)) for action in actions
        ]

        def extend(done: int, order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
            if len(order) == len(actions):
                yield order
            for index, before in enumerate(needed):
                if not done >> index & 1 and before & done == before:
                    yield from extend(done | 1 << index, (*order, index))

        return (tuple(actions[index] for index in order) for order in extend(0, ()))

    def programs(self, is_legal: bool = True) -> Iterator[list[Order]]:
        """Every program, up to the numbers of the microbatches."""
        count = range(len(self.actions))
        sides = [list(self.legal_orders(r) if is_legal else permutations(self.actions[r])) for r in count]
        sides[0] = [order for order in sides[0] if _is_numbered(order)]
        return (list(orders) for orders in product(*sides))

    def sample(self, random: Random) -> list[Order]:
        """A program that is right under rendezvous, with up to three actions moved, or one of random legal orders."""
        if random.random() < 0.2:
            return [self._random_order(rank, random) for rank in range(len(self.actions))]
        orders: list[list[Action]] = [[] for _ in self.actions]
        left = [list(actions) for actions in self.actions]
        while any(left):
            rank = random.choice([rank for rank, actions in enumerate(left) if actions])
            ready = [a for a in left[rank] if not any(self.before(other, a) for other in left[rank] if other is not a)]
            action = random.choice([action for action in ready if not isinstance(action, Recv)] or [None])
            if action is None or not self._is_sent(action, orders):
                continue
            left[rank].remove(action)
            orders[rank].append(action)
            if isinstance(action, Send):
                # The receive is posted at this moment, at the latest.
                recv, other = Recv(action.peer, action.microbatch, action.stage), self.ranks[action.peer]
                left[other].remove(recv)
                orders[other].append(recv)
        for _ in range(random.choice((0, 1, 1, 2, 3))):
            order = random.choice(orders)
            action = order.pop(random.randrange(len(order)))
            order.insert(random.randrange(len(order) + 1), action)
        return [tuple(order) for order in orders]

    def _is_sent(self, action: Action, orders: Sequence[Sequence[Action]]) -> bool:
        """Whether a rank has every message that an action uses."""
        recvs = [other for other in self.actions[self.ranks[action.stage]] if self.before(other, action)]
        return all(recv in orders[self.ranks[action.stage]] for recv in recvs if isinstance(recv, Recv))

    def _random_order(self, rank: int, random: Random) -> Order:
        left, order = list(self.actions[rank]), []
        while left:
            ready = [a for a in left if not any(self.before(other, a) for other in left if other is not a)]
            order.append(random.choice(ready))
            left.remove(order[-1])
        return tuple(order)

    def is_accepted(self, orders: Sequence[Order]) -> bool:
        """Whether `verify` accepts a program."""
        try:
            verify(Program.of(Placement(self.ranks), self.microbatches, self.cuts, orders))
        except ScheduleError:
            return False
        return True

    def is_right(self, orders: Sequence[Order], semantics: str) -> bool:
        """Whether every interleaving ends, with the right values."""
        return Search(self, orders, semantics).succeeds()


def _makes(action: Action, stage: int, is_gradient: bool) -> bool:
    kinds = (Backward, InputGrad) if is_gradient else (Forward,)
    return isinstance(action, kinds) and action.stage == stage


def _is_numbered(order: Iterable[Action]) -> bool:
    """Whether microbatches first occur in the order of their numbers."""
    seen = list(dict.fromkeys(action.microbatch for action in order))  # type: ignore[attr-defined]
    return seen == sorted(seen)


class Search:
    """Visits every state that some interleaving of the ranks reaches. A state is the position of each rank."""

    def __init__(self, family: Family, orders: Sequence[Order], semantics: str) -> None:
        self._family, self._orders, self._semantics = family, orders, semantics
        self._send: dict[Key, tuple[int, int]] = {}
        """rank and position of each send"""
        self._recv: dict[Key, tuple[int, int]] = {}
        self._issued: dict[tuple[int, int], list[tuple[int, bool, Key]]] = {}
        """by rank and other rank: position, whether it is a send, and key of every message"""
        for rank, order in enumerate(orders):
            for position, action in enumerate(order):
                if isinstance(action, Send | Recv):
                    is_send = isinstance(action, Send)
                    ends = (action.stage, action.peer) if is_send else (action.peer, action.stage)
                    key = (*ends, action.microbatch)
                    (self._send if is_send else self._recv)[key] = (rank, position)
                    pair = (rank, family.ranks[action.peer])
                    self._issued.setdefault(pair, []).append((position, is_send, key))
        self._met = self._meetings() if semantics == IN_ORDER else {}

    def _meetings(self) -> dict[Key, tuple[Key, tuple[tuple[int, int], ...]]]:
        """By key of a receive: the key of the send that meets it, and the actions that are done by then.

        Nothing meets after two sends, or two receives, that face each other.
        """
        met: dict[Key, tuple[Key, tuple[tuple[int, int], ...]]] = {}
        for (rank, other), own in self._issued.items():
            theirs = self._issued.get((other, rank), [])
            for (mine, sends, key), (place, other_sends, other_key) in zip(own, theirs, strict=False):
                if sends == other_sends:
                    break
                # The ends that each of them issued before are done as well.
                met[other_key if sends else key] = (key if sends else other_key, ((rank, mine), (other, place)))
        return met

    def succeeds(self, reduces: bool = True) -> bool:
        """Whether every reachable state can continue until all ranks are done, with the right values.

        With `reduces`, of the ranks that can run in a state only the first one does: the others still can afterwards.
        """
        if not all(self._is_legal(order) for order in self._orders):
            return False
        if any(sent != key for key, (sent, _) in self._met.items()):
            return False  # the values of another message
        waits = [[self._waits(order, at) for at in range(len(order))] for order in self._orders]
        end, start = tuple(map(len, self._orders)), (0,) * len(self._orders)
        seen, pending = {start}, [start]
        while pending:
            state = pending.pop()
            is_stuck = state != end
            for rank, position in enumerate(state):
                if position < end[rank] and all(state[other] > place for other, place in waits[rank][position]):
                    is_stuck = False
                    following = (*state[:rank], position + 1, *state[rank + 1 :])
                    if following not in seen:
                        seen.add(following)
                        pending.append(following)
                    if reduces:
                        break
            if is_stuck:
                return False
        return True

    def _is_legal(self, order: Order) -> bool:
        family = self._family
        return not any(
            family.before(later, action) for index, action in enumerate(order) for later in order[index + 1 :]
        )

    def _waits(self, order: Order, position: int) -> list[tuple[int, int]]:
        """The actions, as rank and position, that must be done before the one at a position of an order."""
        action = order[position]
        if isinstance(action, Recv):
            return []
        if isinstance(action, Send):
            return [self._recv[action.stage, action.peer, action.microbatch]] * (self._semantics == RENDEZVOUS)
        keys = [
            (recv.peer, recv.stage, recv.microbatch)
            for recv in order[:position]
            if isinstance(recv, Recv) and self._family.before(recv, action)
        ]
        if self._semantics != IN_ORDER:
            return [self._send[key] for key in keys]
        # A position beyond the end of a rank for a message that never meets its other end.
        never = ((self._family.ranks[action.stage], len(order)),)
        return [place for key in keys for place in (self._met[key][1] if key in self._met else never)]


COMPLETE = (
    (Family((0, 1), 1), False),
    (Family((0, 1), 1, "IW"), False),
    (Family((0, 1), 2), True),
    (Family((0, 1), 3, ""), True),
    (Family((0, 1, 2), 1), True),
    (Family((0, 1, 2), 1, skips=True), True),
    (Family((0, 1, 2), 1, "IW"), True),
    (Family((0, 1, 2), 1, "IW", skips=True), True),
    (Family((0, 1, 2), 2, ""), True),
    (Family((0, 1, 0), 1), True),
    (Family((0, 1, 0), 1, skips=True), True),
    (Family((0, 1, 1, 0), 1), True),
    (Family((0, 1, 0, 1), 1, ""), True),
    (Family((0, 1, 2, 2, 1, 0), 1, ""), True),
    (Family((0, 1, 2, 0, 1, 2), 1, ""), True),
)
"""families, and whether only legal orders are enumerated"""
LARGEST = (Family((0, 1, 1, 0), 1, "IW"), True)
_MAX_ACTIONS = 60
"""of programs of which all samples are taken; of larger ones a tenth"""
SAMPLED = tuple(
    Family(ranks, microbatches, backward, skips)
    for ranks, skips in (
        ((0, 1), False),
        ((0, 1, 2), False),
        ((0, 1, 2), True),
        ((0, 1, 0, 1), False),
        ((0, 1, 1, 0), False),
        ((0, 1, 2, 0, 1, 2), False),
        ((0, 1, 2, 2, 1, 0), False),
    )
    for microbatches in (2, 3)
    for backward in ("B", "IW")
)


def compare(family: Family, programs: Iterable[list[Order]]) -> Counter[str]:
    """Counts of programs: "all", "accepted", right under each of the semantics, and "wrong" where `verify` errs."""
    counts = Counter(all=0, accepted=0, wrong=0)
    for orders in programs:
        is_accepted = family.is_accepted(orders)
        right = {semantics: family.is_right(orders, semantics) for semantics in SEMANTICS}
        counts["all"] += 1
        counts["accepted"] += is_accepted
        counts["wrong"] += is_accepted != (right[RENDEZVOUS] and right[IN_ORDER])
        counts["wrong"] += is_accepted and not right[BUFFERED]
        counts.update(semantics for semantics in SEMANTICS if right[semantics])
    return counts


def tables(num_sampled: int = 300, with_largest: bool = False) -> tuple[Table, ...]:
    """Complete enumerations, then samples of larger programs."""

    def line(family: Family, programs: Iterable[list[Order]]) -> Line:
        counts = compare(family, programs)
        cells = [f"{counts[name]:,}" for name in ("all", "accepted", *SEMANTICS, "wrong")]
        return Line((f"{family!s:<40}", *cells), counts["wrong"], 0, at_least=False)

    complete = (*COMPLETE, *((LARGEST,) if with_largest else ()))
    columns = (f"{'':<40}", "programs", "accepted", *SEMANTICS, "wrong")

    def samples(family: Family, seed: int) -> Iterator[list[Order]]:
        random = Random(seed)
        # The number of states grows with the product of the lengths of the orders.
        count = num_sampled if sum(map(len, family.actions)) <= _MAX_ACTIONS else max(1, num_sampled // 10)
        return (family.sample(random) for _ in range(count))

    return (
        Table(
            "verify compared with an exhaustive search, all programs",
            columns,
            (line(family, family.programs(is_legal)) for family, is_legal in complete),
        ),
        Table(
            "verify compared with an exhaustive search, samples",
            columns,
            (line(family, samples(family, seed)) for seed, family in enumerate(SAMPLED)),
        ),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verifier", description="Compare verify with a search.")
    parser.add_argument("--complete", action="store_true", help="also every program of a vee with split backwards")
    parser.add_argument("--samples", type=int, default=300, metavar="N", help="samples of each larger family")
    options = parser.parse_args()
    results = [table.show().passes for table in tables(options.samples, options.complete)]
    sys.exit(0 if all(results) else 1)
