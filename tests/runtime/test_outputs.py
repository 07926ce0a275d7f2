"""The outputs of microbatches become the output of their batch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.modeling_outputs import CausalLMOutput

from penstock.capture import microbatch_sizes
from penstock.runtime import merge
from penstock.runtime.outputs import batch_dim


@given(batch=st.integers(1, 20), asked=st.integers(1, 6))
def test_what_was_cut_is_put_together_again(batch: int, asked: int) -> None:
    sizes = microbatch_sizes(batch, asked)
    whole = {"x": torch.randn(batch, 3), "tokens": torch.randn(2 * batch, 5)}
    pieces = [{"x": x} for x in whole["x"].split(sizes)]
    assert torch.equal(merge(pieces, sizes)["x"], whole["x"])
    tokens = whole["tokens"].split([2 * size for size in sizes])
    assert torch.equal(merge(tokens, sizes, whole=[(2 * batch, 5)]), whole["tokens"])


def test_structures_stay_what_they_are_and_losses_are_weighted() -> None:
    outputs = [CausalLMOutput(loss=torch.tensor(float(n)), logits=torch.full((1, 2), float(n))) for n in (1, 3)]
    merged = merge(outputs, (1, 1), weights=(0.75, 0.25))
    assert isinstance(merged, CausalLMOutput)
    assert (merged.loss, merged.logits.tolist()) == (1.5, [[1.0, 1.0], [3.0, 3.0]])


def test_without_weights_numbers_are_meant_over_samples() -> None:
    assert merge([torch.tensor(1.0), torch.tensor(4.0)], (2, 1)) == 2.0


def test_what_has_no_weight_has_no_say_even_if_it_is_not_a_number() -> None:
    assert merge([torch.tensor(2.0), torch.tensor(float("nan"))], (1, 1), weights=(1.0, 0.0)) == 2.0


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1)])
def test_a_tensor_given_whole_is_not_concatenated(sizes: tuple[int, ...]) -> None:
    positions = torch.arange(4).unsqueeze(0)
    assert merge([positions, positions], sizes) is positions


def test_with_the_shapes_of_the_whole_batch_single_samples_are_no_riddle() -> None:
    positions, classes = [torch.arange(4).unsqueeze(0) for _ in range(3)], [torch.zeros(1) for _ in range(3)]
    merged = merge(list(zip(positions, classes, strict=True)), (1, 1, 1), whole=[(1, 4), (3,)])
    assert (merged[0].shape, merged[1].shape) == ((1, 4), (3,))


def test_equal_predictions_of_single_samples_are_not_taken_for_one() -> None:
    assert merge([torch.tensor([7]), torch.tensor([7])], (1, 1)).tolist() == [7, 7]


@pytest.mark.parametrize(
    ("shapes", "sizes", "whole", "expected"),
    [
        ([(2, 5), (2, 5)], (2, 2), None, 0),
        ([(5, 2), (5, 2)], (2, 2), (5, 4), 1),
        ([(5, 2), (5, 1)], (2, 1), None, 1),
        ([(6, 5), (3, 5)], (2, 1), None, 0),
        ([(2, 2), (1, 1)], (2, 1), None, None),
        ([(2, 2), (2, 2)], (2, 2), (4, 4), None),
        ([(3, 3), (3, 3)], (2, 1), None, None),
        ([(2, 5), (2, 6)], (2, 2), None, None),
        ([(2, 5), (2,)], (2, 2), None, None),
    ],
)
def test_the_dimension_of_the_samples_is_the_one_that_grows_with_them(
    shapes: list[tuple[int, ...]], sizes: tuple[int, ...], whole: tuple[int, ...] | None, expected: int | None
) -> None:
    assert batch_dim(shapes, sizes, whole) == expected


def test_anything_else_is_one_if_all_are_equal_and_a_list_if_not() -> None:
    merged = merge([("a", 1, None, torch.ones(3)), ("a", 2, None, torch.zeros(3))], (2, 2))
    assert merged[:3] == ("a", [1, 2], None)
    assert [tensor.sum().item() for tensor in merged[3]] == [3, 0]
    assert merge([[1], [1, 2]], (1, 1)) == [[1], [1, 2]]
