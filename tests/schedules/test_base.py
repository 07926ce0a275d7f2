"""The ways in which schedules are written down."""

import numpy as np
import pytest

from penstock.errors import CostError
from penstock.ir import Kind, StageCosts, decode, number_microbatches, pack
from penstock.schedules import SCHEDULES, build
from penstock.schedules.base import passes, staggered, weight_grads_of


def text(codes):
    return " ".join(map(str, decode(codes)))


def test_passes_of_a_number_of_microbatches_are_all_of_them():
    assert text(passes(Kind.FORWARD, 2, 3)) == "2F0 2F1 2F2"


def test_passes_of_an_array_of_microbatches_are_those():
    assert text(passes(Kind.BACKWARD, np.array([0, 4, 4]), np.array([1, 0, 1]))) == "0B1 4B0 4B1"


def test_a_weight_gradient_belongs_to_every_input_gradient():
    assert text(weight_grads_of(passes(Kind.INPUT_GRAD, 3, 2))) == "3W0 3W1"


def test_staggered_sequences_run_side_by_side_from_their_own_step_on():
    forwards, backwards = passes(Kind.FORWARD, 0, 4), passes(Kind.BACKWARD, 0, 4)
    assert text(staggered((forwards, 0), (backwards, 0))) == "0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3"
    assert text(staggered((forwards, 0), (backwards, 2))) == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"
    assert text(staggered((forwards, 0), (backwards, 9))) == "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3"


def test_a_step_does_the_left_sequence_first():
    first, second = passes(Kind.FORWARD, 0, 1), passes(Kind.FORWARD, 1, 1)
    assert text(staggered((first, 0), (second, 0))) == "0F0 1F0"
    assert text(staggered((second, 0), (first, 0))) == "1F0 0F0"


def test_numbering_counts_how_often_an_action_has_occurred():
    f0, f1, i0 = pack(Kind.FORWARD, 0), pack(Kind.FORWARD, 1), pack(Kind.INPUT_GRAD, 0)
    assert text(number_microbatches(np.concatenate([f0, f0, f1, i0, f0, f1, i0]))) == "0F0 0F1 1F0 0I0 0F2 1F1 0I1"


def test_numbering_nothing_gives_nothing():
    assert len(number_microbatches(np.array([], dtype=np.int64))) == 0


@pytest.mark.parametrize("name", SCHEDULES)
def test_numpy_counts_are_counts(name):
    one = SCHEDULES[name]().stages_per_rank
    assert build(name, np.int64(3), np.int32(7), np.int16(one)) == build(name, 3, 7, one)


@pytest.mark.parametrize("name", SCHEDULES)
def test_costs_for_another_number_of_stages_are_refused_by_every_schedule(name):
    with pytest.raises(CostError, match=r"the same number of stages \(costs: 7, schedule: (4|8)\)"):
        build(name, 4, 8, costs=StageCosts.uniform(7))
