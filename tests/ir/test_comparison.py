"""Numbers of two runs are compared, and rounding is distinguished from a difference."""

import math

import pytest

from penstock.ir import Comparison, Difference, Distance, compare_tensors


def of(apart: float, largest: float = 1.0, dtype: str = "float32", name: str = "loss") -> Distance:
    return Distance(name, apart, largest, dtype)


@pytest.mark.parametrize(
    ("dtype", "apart", "expected"),
    [
        ("float64", 1e-13, True), ("float64", 1e-11, False), ("float32", 1e-6, True), ("float32", 1e-4, False),
        ("float16", 1e-3, True), ("bfloat16", 1e-2, True), ("bfloat16", 0.1, False), ("int64", 0.0, True),
        ("complex64", 1e-6, True), ("complex64", 1e-4, False), ("complex128", 1e-11, False), ("int64", 1.0, False),
        ("float32", math.nan, False), ("float32", math.inf, False),
    ],
)  # fmt: skip
def test_rounding_is_that_of_the_type(dtype: str, apart: float, expected: bool) -> None:
    assert compare_tensors("x", [of(apart, 1.0, dtype)], {}).ok is expected


def test_a_difference_is_relative_to_the_largest_entry() -> None:
    assert compare_tensors("x", [of(1e-3, 1e6)], {}).ok
    assert not compare_tensors("x", [of(1e-3, 1e-3)], {}).ok
    assert compare_tensors("x", [of(1e-6, 0.0)], {}).ok


def test_a_small_gradient_is_measured_by_the_largest_one() -> None:
    large, small = of(0.0, 10.0, name="gradient of a"), of(1e-8, 1e-9, name="gradient of b")
    assert compare_tensors("x", [large, small], {}).ok
    assert not compare_tensors("x", [large, of(1e-8, 1e-9, name="buffer b")], {}).ok


def test_low_precision_parts_widen_the_limits_and_are_named() -> None:
    distances = [of(1e-2, name="gradient of a"), of(1e-2)]
    assert not compare_tensors("the loop", distances, {}).ok
    found = compare_tensors("the whole batch", distances, {}, "bfloat16")
    assert found.ok
    assert "equal up to the rounding of bfloat16, in which parts compute, 2 tensors" in str(found)
    assert compare_tensors("x", [of(1e-2, 1.0, "bfloat16")], {}, "bfloat16").coarsest == ""


def test_the_first_difference_is_that_of_the_first_stage() -> None:
    stages = {"gradient of a": 3, "gradient of b": 1}
    distances = [of(0.0), of(0.5, name="gradient of a"), of(0.1, name="gradient of b")]
    found = compare_tensors("the loop", distances, stages)
    assert found.first_wrong is not None
    assert (found.first_wrong.name, found.largest.name) == ("gradient of b", "gradient of a")
    assert "first difference: gradient of b in stage 1: 0.1 (limit 1e-05)" in str(found)
    assert "DIFFERENT" in str(found)


def test_nan_is_farther_off_than_anything() -> None:
    far = Comparison("x", (Difference("a", 0, 5.0, 1.0), Difference("b", 0, float("nan"), 1.0)))
    assert far.largest.name == "b"


def test_identical_numbers_need_few_words() -> None:
    found = compare_tensors("the loop", [of(0.0), of(0.0, name="buffer b")], {})
    assert (found.is_identical, found.first_wrong) == (True, None)
    assert str(found) == "the loop: identical, 2 tensors compared"


def test_a_difference_that_other_last_bits_make_too_is_rounding():
    assert compare_tensors("x", [of(1e-4)], {}, noise={"loss": 1e-5}).ok
    assert not compare_tensors("x", [of(1e-4)], {}, noise={"loss": 1e-6}).ok


def test_a_tensor_that_consists_of_rounding_errors_is_named():
    noisy, clean = of(1.0, name="gradient of a"), of(0.0, name="gradient of b")
    found = compare_tensors("x", [noisy, clean], {}, noise={"gradient of a": 1.0})
    assert found.ok
    assert str(found).endswith("\n  not comparable, as rounding errors are about as large: gradient of a")
    found = compare_tensors("x", [noisy, clean], {}, noise={"gradient of a": 1.0, "gradient of b": 1.0})
    assert str(found).endswith("\n  not comparable, as rounding errors are about as large: gradient of a and 1 more")
