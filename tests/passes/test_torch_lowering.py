"""Our lowering beside torch's own, on the same compute orders: same messages, same shard moves, same reductions."""

from collections import Counter
from collections.abc import Iterable

import pytest

from penstock.ir import Schedule
from penstock.passes import AddShardMoves, lower
from penstock.schedules import build

pipelining = pytest.importorskip("torch.distributed.pipelining.schedules")

TORCH_HAS = ("gpipe", "1f1b", "interleaved", "looped_bfs", "interleaved_zb", "zbv", "dualpipe_v")
SIZES = ((2, 4), (3, 6), (4, 8))
SEVERAL_STAGES = {"interleaved": 5, "looped_bfs": 5, "interleaved_zb": 5, "zbv": None, "dualpipe_v": None}


def torch_actions(order: Iterable[object]) -> list["pipelining._Action"]:
    return [pipelining._Action.from_str(str(action)) for action in order]


def torch_with_messages(schedule: Schedule) -> dict[int, list[str]]:
    orders = {rank: torch_actions(order) for rank, order in enumerate(schedule.orders)}
    lowered = pipelining._add_send_recv(orders, lambda stage: schedule.placement[stage], schedule.num_stages)
    return {rank: list(map(str, order)) for rank, order in lowered.items()}


def messages(order: Iterable[object]) -> Counter[str]:
    return Counter(str(action) for action in order if "SEND" in str(action) or "RECV" in str(action))


def moves_before_each_pass(order: Iterable[object]) -> list[tuple[Counter[str], str]]:
    """For every pass, and for the end, the shard moves between it and the pass before it."""
    groups, moves = [], Counter[str]()
    for action in (*map(str, order), "end"):
        if action.endswith("SHARD"):
            moves[action] += 1
        elif "SEND" not in action and "RECV" not in action:
            groups.append((moves, action))
            moves = Counter()
    return groups


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", TORCH_HAS)
def test_every_rank_holds_the_same_sends_and_receives_as_in_torch(name: str, size: tuple[int, int]) -> None:
    schedule = build(name, *size)
    ours, theirs = lower(schedule), torch_with_messages(schedule)
    for rank, order in enumerate(ours.orders):
        assert messages(order) == messages(theirs[rank])
        assert messages(order)


@pytest.mark.parametrize("ahead", [1, 2, 3])
@pytest.mark.parametrize("name", SEVERAL_STAGES)
def test_shard_moves_stand_before_the_same_passes_as_in_torch(name: str, ahead: int) -> None:
    for size in SIZES:
        schedule = build(name, *size, SEVERAL_STAGES[name])
        program = lower(schedule, passes=["add_transfers", AddShardMoves(ahead)])
        for order, ours in zip(schedule.orders, program.orders, strict=True):
            theirs = pipelining._add_unshard_reshard(torch_actions(order), max_active_stages=ahead)
            assert moves_before_each_pass(ours) == moves_before_each_pass(theirs)


@pytest.mark.parametrize("name", TORCH_HAS)
def test_reductions_follow_the_same_pass_as_in_torch(name: str) -> None:
    schedule = build(name, 4, 8)
    program = lower(schedule, passes=["add_transfers", "add_reductions"])
    for order, ours in zip(schedule.orders, program.orders, strict=True):
        theirs = pipelining._add_reduce_grad(torch_actions(order), schedule.num_microbatches)
        assert [str(a) for a in ours if not messages([a])] == list(map(str, theirs))
