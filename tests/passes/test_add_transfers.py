"""add_transfers: what is sent, what is not, and what cannot be lowered."""

from collections import Counter

import pytest

from penstock.errors import ScheduleError
from penstock.ir import Cuts, Message, Placement, Program, Recv, Schedule, Send
from penstock.passes import AddTransfers, lower
from penstock.schedules import SCHEDULES, build
from tests.passes.corpus import some_cuts

SIZES = ((1, 3), (2, 2), (3, 4), (4, 3))


def wanted(cuts: Cuts, placement: Placement, num_microbatches: int) -> Counter[tuple[int, int, int]]:
    """(source, target, microbatch) of everything that has to travel: values one way, gradients the other."""
    ways = [*cuts.edges, *(edge[::-1] for edge in cuts.edges if edge not in cuts.without_gradient)]
    crossing = [way for way in ways if placement[way[0]] != placement[way[1]]]
    return Counter((*way, microbatch) for way in crossing for microbatch in range(num_microbatches))


def sent(program: Program) -> Counter[tuple[int, int, int]]:
    return Counter((a.stage, a.peer, a.microbatch) for order in program.orders for a in order if isinstance(a, Send))


def received(program: Program) -> Counter[tuple[int, int, int]]:
    return Counter((a.peer, a.stage, a.microbatch) for order in program.orders for a in order if isinstance(a, Recv))


@pytest.mark.parametrize("shape", range(4))
@pytest.mark.parametrize("name", SCHEDULES)
def test_exactly_what_other_ranks_need_is_sent_and_received_once(name: str, shape: int) -> None:
    for num_ranks, num_microbatches in SIZES:
        schedule = build(name, num_ranks, num_microbatches)
        cuts = some_cuts(schedule.num_stages, shape)
        program = AddTransfers()(schedule.with_cuts(cuts))
        assert sent(program) == received(program) == wanted(cuts, schedule.placement, num_microbatches)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_order_of_compute_actions_stays(name: str) -> None:
    schedule = build(name, 3, 4)
    program = AddTransfers()(schedule.with_cuts())
    kept = tuple(tuple(a for a in order if not isinstance(a, Message)) for order in program.orders)
    assert kept == schedule.orders


def test_nothing_is_sent_within_a_rank() -> None:
    program = AddTransfers()(Schedule.from_csv("0F0 1F0 1B0 0B0").with_cuts())
    assert str(program) == "0F0 1F0 1B0 0B0"


def test_a_skip_goes_straight_from_producer_to_consumer() -> None:
    schedule = Schedule.from_csv("0F0 0B0\n1F0 1B0\n2F0 2B0")
    program = AddTransfers()(schedule.with_cuts(Cuts.of(3, [(0, 1), (1, 2), (0, 2)])))
    assert str(program).splitlines() == [
        "0F0 0SEND_F0 0SEND_F0>2 0RECV_B0<2 0RECV_B0 0B0",
        "1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0",
        "2RECV_F0<0 2RECV_F0 2F0 2B0 2SEND_B0>0 2SEND_B0",
    ]


def test_an_edge_without_gradient_sends_nothing_back() -> None:
    schedule = Schedule.from_csv("0F0 0B0\n1F0 1B0")
    program = AddTransfers()(schedule.with_cuts(Cuts.of(2, [(0, 1)], without_gradient=[(0, 1)])))
    assert str(program) == "0F0 0SEND_F0 0B0\n1RECV_F0 1F0 1B0"


def test_stages_that_nothing_connects_exchange_nothing() -> None:
    program = AddTransfers()(Schedule.from_csv("0F0 0B0\n1F0 1B0").with_cuts(Cuts.of(2, [])))
    assert str(program) == "0F0 0B0\n1F0 1B0"


def test_an_overlapped_pair_sends_what_both_halves_made() -> None:
    schedule = Schedule.from_csv("0F0 0F1 0B0 0B1\n1F0 (1F1;1B0)OVERLAP_F_B 1B1")
    assert str(AddTransfers()(schedule.with_cuts())).splitlines()[1] == (
        "1RECV_F0 1F0 1RECV_F1 (1F1;1B0)OVERLAP_F_B 1SEND_B0 1B1 1SEND_B1"
    )


def test_a_schedule_that_deadlocks_is_refused_with_the_circle() -> None:
    schedule = Schedule.from_csv("0F0 0B1 0F1 0B0\n1F0 1F1 1B0 1B1")
    with pytest.raises(ScheduleError, match="deadlock"):
        AddTransfers()(schedule.with_cuts())


def test_a_missing_pass_is_named() -> None:
    with pytest.raises(ScheduleError, match=r"nothing makes the output that an action needs \(stage: 0, microbatch: 1"):
        AddTransfers()(Schedule.from_csv("0F0 0B0\n1F0 1F1 1B0 1B1").with_cuts())


def test_lowering_takes_the_cuts_to_add_transfers() -> None:
    cuts = Cuts.of(2, [(0, 1)], without_gradient=[(0, 1)])
    program = lower(build("gpipe", 2, 1), cuts=cuts, passes=["add_transfers"])
    assert program.cuts == cuts
