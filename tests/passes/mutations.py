"""Ways to spoil a program, or to change it harmlessly, each drawn from a seeded generator."""

from collections.abc import Callable
from dataclasses import fields, replace
from itertools import pairwise
from random import Random

from penstock.ir import (
    Action,
    Backward,
    Forward,
    Free,
    InputGrad,
    Kind,
    Message,
    Overlap,
    Recv,
    Reduce,
    Reshard,
    Send,
    Unshard,
    WeightGrad,
)
from tests.passes.executor import Draft

Lists = list[list[Action]]


def mutate(draft: Draft, kind: str, random: Random) -> Draft:
    """The draft with one mutation of the given kind; the draft as it is if it has no actions for that."""
    orders = [list(order) for order in draft.orders]
    ranks = [rank for rank, order in enumerate(orders) if order]
    MUTATIONS[kind](draft, orders, random.choice(ranks), random)
    return replace(draft, orders=tuple(map(tuple, orders)))


def swap_neighbours(draft: Draft, orders: Lists, rank: int, random: Random) -> None:
    order = orders[rank]
    place = random.randrange(max(len(order) - 1, 1))
    order[place : place + 2] = order[place : place + 2][::-1]


def swap(draft: Draft, orders: Lists, rank: int, random: Random) -> None:
    order = orders[rank]
    one, other = random.randrange(len(order)), random.randrange(len(order))
    order[one], order[other] = order[other], order[one]


def drop(draft: Draft, orders: Lists, rank: int, random: Random) -> None:
    orders[rank].pop(random.randrange(len(orders[rank])))


def duplicate(draft: Draft, orders: Lists, rank: int, random: Random) -> None:
    order = orders[rank]
    order.insert(random.randrange(len(order) + 1), random.choice(order))


def move(draft: Draft, orders: Lists, rank: int, random: Random) -> None:
    order = orders[rank]
    action = order.pop(random.randrange(len(order)))
    order.insert(random.randrange(len(order) + 1), action)


def move_a_little(draft: Draft, orders: Lists, rank: int, random: Random) -> None:
    order = orders[rank]
    place = random.randrange(len(order))
    order.insert(max(0, place + random.randint(-3, 3)), order.pop(place))


def move_to_another_rank(draft: Draft, orders: Lists, rank: int, random: Random) -> None:
    other = random.choice(orders)
    action = orders[rank].pop(random.randrange(len(orders[rank])))
    other.insert(random.randrange(len(other) + 1), action)


def retarget_stage(draft: Draft, orders: Lists, rank: int, random: Random) -> None:
    _retarget(orders[rank], "stage", draft.placement.num_stages + 1, random)


def retarget_microbatch(draft: Draft, orders: Lists, rank: int, random: Random) -> None:
    _retarget(orders[rank], "microbatch", draft.num_microbatches + 1, random)


def retarget_peer(draft: Draft, orders: Lists, rank: int, random: Random) -> None:
    """Also far beyond the last stage, where numbers may be mistaken for those of another message."""
    _retarget(orders[rank], "peer", 3 * draft.placement.num_stages, random)


def retarget_both_ends(draft: Draft, orders: Lists, rank: int, random: Random) -> None:
    """A message between any two stages, existing or not, in place of another one."""
    places = [place for place, action in enumerate(orders[rank]) if isinstance(action, Message)]
    if places:
        place = random.choice(places)
        stage, peer = random.choice(draft.placement.stages[rank]), random.randrange(3 * draft.placement.num_stages)
        orders[rank][place] = replace(orders[rank][place], stage=stage, peer=peer + (peer == stage))


def exchange_messages(draft: Draft, orders: Lists, rank: int, random: Random) -> None:
    """Two messages change places on both sides, so that the two ranks still agree."""
    known = range(draft.placement.num_stages)
    sends = [action for action in orders[rank] if isinstance(action, Send) and {action.stage, action.peer} <= {*known}]
    one, other = random.choices(sends or [None], k=2)
    if one and draft.placement[one.peer] == draft.placement[other.peer]:
        for ends in ((one, other), tuple(Recv(send.peer, send.microbatch, send.stage) for send in (one, other))):
            order = orders[draft.placement[ends[0].stage]]
            places = [order.index(end) for end in ends if end in order]
            for place, end in zip(places, reversed(ends), strict=False):
                order[place] = end


def post_late(draft: Draft, orders: Lists, rank: int, random: Random) -> None:
    """Receives sink towards their use, but never past a message with the same rank: pairs agree, rings may close."""
    for order in orders:
        for place in reversed([place for place, action in enumerate(order) if isinstance(action, Recv)]):
            while random.random() < 0.95 and place + 1 < len(order) and _may_sink(draft, *order[place : place + 2]):
                order[place : place + 2] = order[place : place + 2][::-1]
                place += 1


def _may_sink(draft: Draft, recv: Recv, below: Action) -> bool:
    if isinstance(below, Message):
        home = dict(enumerate(draft.placement.ranks))
        return home.get(below.peer) != home.get(recv.peer)
    halves = (below.forward, below.backward) if isinstance(below, Overlap) else (below,)
    return recv.stage not in {half.stage for half in halves}


def overlap_neighbours(draft: Draft, orders: Lists, rank: int, random: Random) -> None:
    """A forward and a full backward that stand side by side run together, though one may need the other."""
    order = orders[rank]
    pairs = [(place, sorted(two, key=lambda action: action.kind)) for place, two in enumerate(pairwise(order))]
    pairs = [(place, two) for place, two in pairs if [action.kind for action in two] == [Kind.FORWARD, Kind.BACKWARD]]
    if pairs:
        place, halves = random.choice(pairs)
        order[place : place + 2] = [Overlap(*halves)]


def change_kind(draft: Draft, orders: Lists, rank: int, random: Random) -> None:
    """A pass becomes another pass, a send becomes a receive, a gathering a dropping."""
    alike = ((Forward, Backward, InputGrad, WeightGrad, Free), (Send, Recv), (Unshard, Reshard, Reduce))
    place = random.randrange(len(orders[rank]))
    action = orders[rank][place]
    for kinds in alike:
        if isinstance(action, kinds):
            values = [getattr(action, item.name) for item in fields(action)]
            orders[rank][place] = random.choice([kind for kind in kinds if not isinstance(action, kind)])(*values)


def _retarget(order: list[Action], field: str, limit: int, random: Random) -> None:
    def has(action: Action) -> bool:
        return field in {item.name for item in fields(action.forward if isinstance(action, Overlap) else action)}

    places = [place for place, action in enumerate(order) if has(action)]
    if not places:
        return
    place = random.choice(places)
    order[place] = _retargeted(order[place], field, limit, random)


def _retargeted(action: Action, field: str, limit: int, random: Random) -> Action:
    if isinstance(action, Overlap):
        half = random.choice(("forward", "backward"))
        return replace(action, **{half: _retargeted(getattr(action, half), field, limit, random)})
    # A message of a stage to itself cannot even be written down.
    taken = ("microbatch",) if field == "microbatch" else ("stage", "peer")
    others = set(range(limit)) - {getattr(action, name, None) for name in taken}
    return replace(action, **{field: random.choice(sorted(others))})


MUTATIONS: dict[str, Callable[[Draft, Lists, int, Random], None]] = {
    mutation.__name__: mutation
    for mutation in (
        swap_neighbours,
        swap,
        drop,
        duplicate,
        move,
        move_a_little,
        move_to_another_rank,
        retarget_stage,
        retarget_microbatch,
        retarget_peer,
        retarget_both_ends,
        exchange_messages,
        post_late,
        overlap_neighbours,
        change_kind,
    )
}
