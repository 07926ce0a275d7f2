"""What ranks hold over time, computed by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.ir import MessageCost, Program, StageCosts, StateBytes
from penstock.passes import lower
from penstock.schedules import SCHEDULES, build
from penstock.simulate import simulate


def curve(program, costs, rank=0):
    """[(second, bytes held from then on)]"""
    memory = simulate(Program.from_csv(program), costs).memory[rank]
    return list(zip(memory.seconds, memory.held, strict=True))


def costs(num_stages=1, **further):
    return StageCosts((1,) * num_stages, (2,) * num_stages, (3,) * num_stages, **further)


def test_activations_are_held_from_the_start_of_the_forward_to_the_end_of_the_backward():
    assert curve("0F0,0B0", costs(activation_bytes=(10,))) == [(0, 0), (0, 10), (6, 0)]


def test_a_split_backward_gives_back_a_part_with_each_half():
    held = costs(activation_bytes=(10,), weight_grad_bytes=(4,))
    assert curve("0F0,0I0,0W0", held) == [(0, 0), (0, 10), (3, 4), (6, 0)]


def test_unless_stated_the_weight_gradient_needs_all_activations():
    assert curve("0F0,0I0,0W0", costs(activation_bytes=(10,))) == [(0, 0), (0, 10), (3, 10), (6, 0)]


def test_microbatches_in_flight_add_up():
    assert curve("0F0,0F1,0B0,0B1", costs(activation_bytes=(10,))) == [(0, 0), (0, 10), (1, 20), (7, 10), (12, 0)]


def test_memory_released_at_one_moment_can_be_reused_at_that_moment():
    trace = simulate(Program.from_csv("0F0,0B0,0F1,0B1"), costs(activation_bytes=(10,)))
    assert trace.peak_bytes(0) == 10


def test_the_last_part_is_released_by_free():
    late = "0F0,0B0,0F1,0FREE0,0B1,0FREE1"
    assert curve(late, costs(activation_bytes=(10,))) == [(0, 0), (0, 10), (6, 20), (7, 10), (12, 0)]


def test_free_after_a_split_backward_delays_only_what_the_weight_gradient_kept():
    late = "0F0,0I0,0W0,0F1,0FREE0,0B1,0FREE1"
    held = costs(activation_bytes=(10,), weight_grad_bytes=(4,))
    assert curve(late, held) == [(0, 0), (0, 10), (3, 4), (6, 14), (7, 10), (12, 0)]


def test_a_forward_without_a_backward_frees_its_activations_when_it_ends():
    assert curve("0F0,0F1", costs(activation_bytes=(10,))) == [(0, 0), (0, 10), (1, 10), (2, 0)]


def test_a_forward_without_a_backward_frees_at_its_free_if_there_is_one():
    late = "0F0,0F1,0FREE0,0FREE1"
    assert curve(late, costs(activation_bytes=(10,))) == [(0, 0), (0, 10), (1, 20), (2, 0)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_an_evaluation_holds_the_activations_of_one_forward_at_a_time(name):
    forwards = build(name, 4, 6).forwards()
    kept = range(10, 10 + forwards.num_stages)
    held = costs(forwards.num_stages, activation_bytes=tuple(kept))
    for program in (lower(forwards), lower(forwards, passes=("add_transfers", "hoist_receives"))):
        trace = simulate(program, held)
        for rank, stages in enumerate(forwards.placement.stages):
            assert trace.peak_bytes(rank) == max(kept[stage] for stage in stages)
            assert trace.memory[rank].held[len(trace.memory[rank].held) - 1] == 0


def test_an_overlapped_pair_holds_both_halves_until_it_ends():
    pair = "0F0,(0F1;0B0)OVERLAP_F_B,0B1"
    assert curve(pair, costs(activation_bytes=(10,))) == [(0, 0), (0, 10), (1, 20), (7, 10), (12, 0)]


def test_parameters_gradients_and_optimizer_state_are_held_all_the_time():
    state = StateBytes(parameters=100, gradients=20, optimizer=3)
    assert state.total == 123
    assert curve("0F0,0B0", costs(activation_bytes=(10,), state=(state,))) == [(0, 123), (0, 133), (6, 123)]


def test_a_rank_holds_the_state_of_all_its_stages():
    state = (StateBytes(1), StateBytes(20), StateBytes(300), StateBytes(4000))
    trace = simulate(lower(build("zbv", 2, 1)), costs(4, state=state))
    assert [trace.peak_bytes(rank) for rank in (0, 1)] == [4001, 320]


TWO_RANKS = """
0F0,0SEND_F0,0RECV_B0,0B0
1RECV_F0,1F0,1B0,1SEND_B0
""".strip()
MESSAGE = {"messages": (MessageCost(0, 1, forward_bytes=5, backward_bytes=7),)}


def test_a_received_value_has_a_buffer_from_its_receive_until_the_forward_that_keeps_it():
    assert curve(TWO_RANKS, costs(2, activation_bytes=(10, 20), **MESSAGE), rank=1) == [
        (0, 0),
        (0, 5),  # receive posted
        (1, 20),  # the forward takes the buffer over as a part of its activations
        (7, 0),
    ]


def test_a_received_gradient_has_a_buffer_from_its_receive_to_the_end_of_the_backward():
    assert curve(TWO_RANKS, costs(2, activation_bytes=(10, 20), **MESSAGE), rank=0) == [
        (0, 0),
        (0, 10),
        (1, 17),  # receive posted
        (12, 0),
    ]


def test_memory_released_and_taken_at_one_moment_leaves_no_dip():
    assert curve("0F0,0B0,0F1,0B1", costs(activation_bytes=(10,))) == [(0, 0), (0, 10), (6, 10), (12, 0)]


def test_a_peak_inside_one_moment_is_kept():
    held = StageCosts((0,), (0,), (0,), activation_bytes=(10,))
    assert curve("0F0,0B0,0F1,0B1", held) == [(0, 0), (0, 10), (0, 0)]


def test_a_buffer_larger_than_what_takes_it_over_is_part_of_the_peak():
    held = StageCosts((0, 1), (1, 1), (1, 1), activation_bytes=(1, 2), **MESSAGE)
    assert curve(TWO_RANKS, held, rank=1) == [(0, 0), (0, 5), (0, 2), (3, 0)]
    assert simulate(Program.from_csv(TWO_RANKS), held).peak_bytes(1) == 5


def test_a_receive_that_is_posted_earlier_holds_its_buffer_longer():
    early = TWO_RANKS.replace("0F0,0SEND_F0,0RECV_B0,0B0", "0RECV_B0,0F0,0SEND_F0,0B0")
    assert curve(early, costs(2, **MESSAGE), rank=0)[:2] == [(0, 0), (0, 7)]


@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_a_step_ends_with_what_it_began_with_and_never_holds_less(name, data):
    schedule = build(name, data.draw(st.integers(1, 4)), data.draw(st.integers(1, 8)))
    sizes = st.lists(st.integers(0, 9), min_size=schedule.num_stages, max_size=schedule.num_stages)
    kept = data.draw(sizes)
    late = [min(pair) for pair in zip(kept, data.draw(sizes), strict=True)]
    messages = [MessageCost(stage, stage + 1, 3, 2) for stage in range(schedule.num_stages - 1)]
    state = [StateBytes(size) for size in data.draw(sizes)]
    held = costs(schedule.num_stages, activation_bytes=kept, weight_grad_bytes=late, messages=messages, state=state)
    for rank, memory in enumerate(simulate(lower(schedule), held).memory):
        base = sum(state[stage].total for stage in schedule.placement.stages[rank])
        assert memory.held[0] == memory.held[len(memory.held) - 1] == base
        assert min(memory.held) == base
        assert list(memory.seconds) == sorted(memory.seconds)
