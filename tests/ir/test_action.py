"""Actions: their texts, their limits, and what each needs and makes."""

import enum
import sys

import numpy as np
import pytest

from penstock.errors import ScheduleError
from penstock.ir import (
    MAX_MICROBATCHES,
    MAX_STAGES,
    Backward,
    Cuts,
    Fact,
    Forward,
    Free,
    InputGrad,
    Kind,
    Need,
    Overlap,
    Recv,
    Reduce,
    Reshard,
    Send,
    Unshard,
    WeightGrad,
    makes,
    needs,
)

OUTPUT, INPUT_GRADIENT, WEIGHT_GRADIENT = Fact.OUTPUT, Fact.INPUT_GRADIENT, Fact.WEIGHT_GRADIENT
CHAIN = Cuts.chain(3)
# 0 -> 1 -> 2 -> 3, and a skip from 0 to 3
SKIP = Cuts.of(4, [(0, 1), (1, 2), (2, 3), (0, 3)])
# two towers, 0 and 1, joined in 2
BRANCH = Cuts.of(3, [(0, 2), (1, 2)])


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (Forward(2, 0), "2F0"),
        (Backward(0, 2), "0B2"),
        (InputGrad(1, 3), "1I3"),
        (WeightGrad(1, 3), "1W3"),
        (Overlap(Forward(2, 2), Backward(1, 0)), "(2F2;1B0)OVERLAP_F_B"),
        (Send(3, 1, 4), "3SEND_F1"),
        (Recv(3, 1, 2), "3RECV_F1"),
        (Send(3, 1, 2), "3SEND_B1"),
        (Recv(3, 1, 4), "3RECV_B1"),
        (Send(1, 0, 4), "1SEND_F0>4"),
        (Recv(4, 0, 1), "4RECV_F0<1"),
        (Send(4, 0, 1), "4SEND_B0>1"),
        (Recv(1, 0, 4), "1RECV_B0<4"),
        (Unshard(1), "1UNSHARD"),
        (Reshard(1), "1RESHARD"),
        (Reduce(2), "2REDUCE_GRAD"),
        (Free(2, 0), "2FREE0"),
    ],
)
def test_an_action_prints_in_torchs_grammar(action, text):
    assert str(action) == text


@pytest.mark.parametrize(
    ("action", "cuts", "needed"),
    [
        (Forward(0, 5), CHAIN, []),
        (Forward(1, 5), CHAIN, [(OUTPUT, 0)]),
        (Backward(2, 5), CHAIN, [(OUTPUT, 2)]),
        (Backward(1, 5), CHAIN, [(OUTPUT, 1), (INPUT_GRADIENT, 2)]),
        (InputGrad(1, 5), CHAIN, [(OUTPUT, 1), (INPUT_GRADIENT, 2)]),
        (WeightGrad(1, 5), CHAIN, [(INPUT_GRADIENT, 1)]),
        (Forward(3, 5), SKIP, [(OUTPUT, 0), (OUTPUT, 2)]),
        (Backward(0, 5), SKIP, [(OUTPUT, 0), (INPUT_GRADIENT, 1), (INPUT_GRADIENT, 3)]),
        (Forward(1, 5), BRANCH, []),
        (Forward(2, 5), BRANCH, [(OUTPUT, 0), (OUTPUT, 1)]),
        (InputGrad(0, 5), BRANCH, [(OUTPUT, 0), (INPUT_GRADIENT, 2)]),
    ],
)
def test_an_action_needs_what_its_stage_reads(action, cuts, needed):
    assert sorted(needs(action, cuts)) == sorted(Need(fact, stage, 5) for fact, stage in needed)


def test_a_backward_does_not_wait_for_a_reader_that_returns_no_gradient():
    cuts = Cuts.of(3, [(0, 1), (0, 2), (1, 2)], without_gradient=[(0, 2)])
    assert needs(Backward(0, 0), cuts) == (Need(OUTPUT, 0, 0), Need(INPUT_GRADIENT, 1, 0))


@pytest.mark.parametrize(
    ("action", "made"),
    [
        (Forward(1, 2), [OUTPUT]),
        (Backward(1, 2), [INPUT_GRADIENT, WEIGHT_GRADIENT]),
        (InputGrad(1, 2), [INPUT_GRADIENT]),
        (WeightGrad(1, 2), [WEIGHT_GRADIENT]),
    ],
)
def test_an_action_makes_facts_about_its_own_stage_and_microbatch(action, made):
    assert makes(action) == tuple(Need(fact, 1, 2) for fact in made)


def test_a_full_backward_makes_what_the_two_halves_make():
    assert makes(Backward(1, 2)) == makes(InputGrad(1, 2)) + makes(WeightGrad(1, 2))


def test_an_overlapped_pair_has_two_parts_and_a_single_pass_itself():
    forward, backward = Forward(2, 2), Backward(1, 0)
    assert Overlap(forward, backward).parts == (forward, backward)
    assert forward.parts == (forward,)


@pytest.mark.parametrize(
    ("message", "is_gradient"),
    [(Send(1, 0, 2), False), (Recv(2, 0, 1), False), (Send(2, 0, 1), True), (Recv(1, 0, 2), True)],
)
def test_gradients_travel_from_a_later_stage_to_an_earlier_one(message, is_gradient):
    assert message.is_gradient is is_gradient


@pytest.mark.parametrize(
    "make",
    [
        lambda: Forward(-1, 0),
        lambda: Forward(MAX_STAGES, 0),
        lambda: Forward(0, MAX_MICROBATCHES),
        lambda: Free(0, -1),
        lambda: Reduce(MAX_STAGES),
        lambda: Send(0, 0, MAX_STAGES),
        lambda: Recv(3, 0, 3),
    ],
)
def test_sizes_that_no_pipeline_has_are_refused(make):
    with pytest.raises(ScheduleError):
        make()


def test_the_error_carries_the_value_and_the_limit():
    with pytest.raises(ScheduleError, match=r"stage out of range \(stage: 8192, limit: 8192\)"):
        Forward(MAX_STAGES, 0)


def test_equal_actions_are_one_key():
    assert len({Forward(1, 2), Forward(1, 2), Backward(1, 2)}) == 2


def test_arrays_are_compared_with_a_kind_without_code_of_enums_in_which_ctrl_c_would_be_lost() -> None:
    kinds, kind, files = np.arange(5), Kind.INPUT_GRAD, set()
    sys.setprofile(lambda frame, event, _: files.add(frame.f_code.co_filename) if event == "call" else None)
    try:
        found = (kinds == kind, np.where(kinds == kind, kind, kinds), kinds - kind)
    finally:
        sys.setprofile(None)
    assert enum.__file__ not in files
    assert [array.tolist() for array in found] == [[False, False, True, False, False], [0, 1, 2, 3, 4], [*range(-2, 3)]]
