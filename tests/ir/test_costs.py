"""StageCosts: what is left out, what is refused, and the bytes of messages."""

import math

import numpy as np
import pytest

from penstock.errors import CostError
from penstock.ir import MAX_STAGES, MessageCost, StageCosts, StateBytes


def test_a_full_backward_costs_both_parts_when_left_out():
    costs = StageCosts(forward=(1.0, 2.0), input_grad=(3.0, 4.0), weight_grad=(5.0, 6.0))
    assert costs.backward == (8.0, 10.0)


def test_uniform_costs_are_equal_stages():
    costs = StageCosts.uniform(2, forward=1.0, input_grad=2.0, weight_grad=3.0)
    assert (costs.forward, costs.input_grad, costs.weight_grad, costs.backward) == ((1, 1), (2, 2), (3, 3), (5, 5))


def test_bytes_are_zero_when_left_out():
    costs = StageCosts.uniform(2)
    assert (costs.activation_bytes, costs.weight_grad_bytes) == ((0, 0), (0, 0))
    assert costs.state == (StateBytes(), StateBytes())


def test_the_weight_gradient_needs_all_activations_when_nothing_else_is_said():
    costs = StageCosts((1.0,), (1.0,), (1.0,), activation_bytes=(7,))
    assert costs.weight_grad_bytes == (7,)


def test_lists_become_tuples_so_that_costs_are_keys():
    costs = StageCosts([1.0, 1.0], [1.0, 1.0], [1.0, 1.0], messages=[MessageCost(0, 1, 2, 3)])
    assert costs.messages == (MessageCost(0, 1, 2, 3),)
    assert hash(costs) == hash(StageCosts((1.0,) * 2, (1.0,) * 2, (1.0,) * 2, messages=(MessageCost(0, 1, 2, 3),)))


def test_a_message_has_bytes_there_and_back():
    costs = StageCosts((1.0,) * 3, (1.0,) * 3, (1.0,) * 3, messages=(MessageCost(0, 2, 10, 4),))
    source, target = np.array([0, 2, 0, 1]), np.array([2, 0, 1, 2])
    assert costs.message_bytes(source, target).tolist() == [10, 4, 0, 0]


def test_without_message_costs_messages_have_no_bytes():
    assert StageCosts.uniform(2).message_bytes(np.array([0]), np.array([1])).tolist() == [0]


def test_state_adds_up():
    assert StateBytes(1, 2, 4).total == 7


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"forward": ()}, "number of stages out of range"),
        ({"forward": (1.0,) * (MAX_STAGES + 1)}, "number of stages out of range"),
        ({"input_grad": (1.0,)}, "input_grad must have one entry per stage"),
        ({"backward": (1.0,)}, "backward must have one entry per stage"),
        ({"forward": (1.0, -1.0)}, r"forward must be a finite number, 0 or more \(stage: 1, value: -1.0\)"),
        ({"weight_grad": (math.nan, 1.0)}, "weight_grad must be a finite number"),
        (
            {"forward": 1.0},
            r"(?s)forward must have one entry per stage \(got: 1.0\).*try: forward=\(1.0,\) \* num_stages",
        ),
        ({"input_grad": (1.0, "a")}, r"input_grad must be a finite number, 0 or more \(stage: 1, value: 'a'\)"),
        ({"weight_grad": (None, 1.0)}, r"weight_grad must be a finite number, 0 or more \(stage: 0, value: None\)"),
        ({"forward": (10**400, 1.0)}, "forward must be a finite number"),
        ({"state": (StateBytes(), 7)}, r"state must be a StateBytes record per stage \(stage: 1, got: 7\)"),
        ({"state": (StateBytes(), StateBytes("a"))}, "bytes of state must be 0 or more"),
        ({"messages": ((0, 1, 2, 3),)}, "messages must be MessageCost records"),
        ({"activation_bytes": (0, -1)}, "activation_bytes must be a finite number"),
        ({"state": (StateBytes(),)}, "state must have one entry per stage"),
        ({"state": (StateBytes(), StateBytes(optimizer=-1))}, "bytes of state must be 0 or more"),
        ({"messages": (MessageCost(1, 0, 1, 1),)}, "a message must lead from a stage to a later one"),
        ({"messages": (MessageCost(0, 2, 1, 1),)}, "a message must lead from a stage to a later one"),
        ({"messages": (MessageCost(0, 1, -1, 1),)}, "bytes of a message must be 0 or more"),
    ],
)
def test_costs_that_make_no_sense_are_refused(wrong, problem):
    right = {"forward": (1.0, 1.0), "input_grad": (1.0, 1.0), "weight_grad": (1.0, 1.0)}
    with pytest.raises(CostError, match=problem):
        StageCosts(**{**right, **wrong})


def test_passes_take_so_many_times_longer_stage_by_stage():
    longer = StageCosts((1.0, 2.0), (1.0, 2.0), (3.0, 4.0), (4.0, 5.0), (7, 8)).times((1.0, 1.5))
    assert longer == StageCosts((1.0, 3.0), (1.0, 3.0), (3.0, 6.0), (4.0, 7.5), (7, 8))
    with pytest.raises(CostError, match=r"another number of stages \(costs: 2, factors: 1\)"):
        longer.times((1.0,))
