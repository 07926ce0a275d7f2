"""Every difference between what ranks see of an edge is reported."""

import random

import numpy as np
import pytest
import torch

from penstock import lower, schedule
from penstock.ir import Crossing, TensorSpec, Value
from penstock.runtime import Agreement, checksum, first_difference
from penstock.runtime.agreement import describe_batch, different_batches

DTYPES = ("float32", "float64", "bfloat16", "int64", "bool")
PROGRAM = lower(schedule("1f1b", 3, 2))


def spec(dice: random.Random) -> TensorSpec:
    shape = tuple(dice.randint(0, 6) for _ in range(dice.randint(0, 3)))
    order = tuple(reversed(range(len(shape)))) if len(shape) > 1 and dice.random() < 0.3 else ()
    return TensorSpec(shape, dice.choice(DTYPES), dice.random() < 0.5, order)


def edges(dice: random.Random) -> list[dict[tuple[int, int], Crossing]]:
    def crossing(producer: int, consumer: int) -> Crossing:
        values = tuple(Value(f"v{number}", spec(dice)) for number in range(dice.randint(1, 3)))
        return Crossing(producer, consumer, values)

    return [{edge: crossing(*edge) for edge in ((0, 1), (1, 2), (0, 2))} for _ in range(2)]


def changed(dice: random.Random, spec: TensorSpec) -> TensorSpec:
    """Another spec, often of equal size in bytes, which gloo would take for the same."""
    changes = [
        TensorSpec((*spec.shape, 1), spec.dtype, spec.requires_grad),
        TensorSpec(spec.shape, DTYPES[(DTYPES.index(spec.dtype) + 1) % len(DTYPES)], spec.requires_grad, spec.order),
        TensorSpec(spec.shape, spec.dtype, not spec.requires_grad, spec.order),
    ]
    if len(set(spec.shape)) > 1:
        changes.append(TensorSpec(tuple(reversed(spec.shape)), spec.dtype, spec.requires_grad))
    if len(spec.shape) > 1:
        order = () if spec.order else tuple(reversed(range(len(spec.shape))))
        changes.append(TensorSpec(spec.shape, spec.dtype, spec.requires_grad, order))
    return dice.choice([other for other in changes if other != spec])


@pytest.mark.parametrize("seed", range(10))
def test_a_hundred_edges_changed_at_one_end_are_all_refused_with_both_stages_and_both_specs(seed):
    dice = random.Random(seed)
    for _ in range(100):
        ours = edges(dice)
        theirs = [dict(crossings) for crossings in ours]
        microbatch, edge = dice.randrange(2), dice.choice(list(ours[0]))
        values = list(ours[microbatch][edge].values)
        place = dice.randrange(len(values))
        old = values[place]
        values[place] = Value(old.name, changed(dice, old.spec))
        theirs[microbatch][edge] = Crossing(*edge, tuple(values))
        one, other = Agreement.of_step(PROGRAM, ours, "train"), Agreement.of_step(PROGRAM, theirs, "train")
        assert one.digest != other.digest
        problem = str(first_difference([one.lines, one.lines, other.lines]))
        assert f"producer: stage {edge[0]}, consumer: stage {edge[1]}" in problem
        assert str(old.spec) in problem
        assert str(values[place].spec) in problem


@pytest.mark.parametrize(
    ("first", "other"),
    [
        (np.zeros((2, 3)), np.zeros((3, 2))),
        (np.zeros(4, dtype=np.int32), np.zeros(4, dtype=np.float32)),
        (np.arange(3), np.arange(3, 6)),
    ],
)
def test_arrays_of_other_shape_dtype_or_entries_have_other_checksums(first, other):
    assert checksum({"x": first}) == checksum({"x": first.copy()}) != checksum({"x": other})


@pytest.mark.parametrize(
    ("first", "other", "shown"),
    [
        (torch.arange(80), torch.arange(80) * (torch.arange(80) < 70), "int64[80] after entry 63"),
        ("a" * 70, "a" * 71, "after the first 64 characters"),
        (np.zeros(100), np.append(np.zeros(99), 1.0), "after the first 64 characters"),
    ],
)
def test_batches_that_are_shown_alike_differ_after_that(first, other, shown):
    error = different_batches([describe_batch({"x": first}), describe_batch({"x": other})])
    assert error.values["rank_0"] == error.values["rank_1"]
    assert str(error.values["rank_0"]).endswith(shown)


def test_ranks_that_see_the_same_have_no_difference():
    ours = edges(random.Random(0))
    assert first_difference([Agreement.of_step(PROGRAM, ours, "train").lines] * 3) is None


def test_an_edge_that_only_one_rank_has_is_named():
    ours = edges(random.Random(0))
    theirs = [{edge: found for edge, found in crossings.items() if edge != (0, 2)} for crossings in ours]
    problem = first_difference(
        [Agreement.of_step(PROGRAM, ours, "train").lines, Agreement.of_step(PROGRAM, theirs, "train").lines]
    )
    assert "stage 0" in str(problem)


def test_another_order_of_actions_is_a_difference():
    ours = edges(random.Random(0))
    other = lower(schedule("gpipe", 3, 2))
    problem = first_difference(
        [Agreement.of_step(PROGRAM, ours, "train").lines, Agreement.of_step(other, ours, "train").lines]
    )
    assert "program of" in str(problem)


def test_a_difference_between_models_names_the_ranks_that_were_compared():
    lines = [["model blocks.0: Linear; weight [4, 4]"], ["model blocks.0: Linear; weight [4, 8]"]]
    problem = str(first_difference(lines, ranks=[2, 5]))
    assert "where: blocks.0, rank 2: weight [4, 4], rank 5: weight [4, 8]" in problem
