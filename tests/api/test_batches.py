"""Batches in any usual form become the arguments of a step."""

import pytest
import torch

from penstock.api.train_loop import size_of, step_batch
from penstock.batches import Batch
from penstock.errors import RunError

X, Y = torch.ones(3, 5), torch.zeros(3)
FORMS = {
    "a tensor": (X, ((X,), {})),
    "a tuple of arguments": ((X, 2), ((X, 2), {})),
    "a list of arguments": ([X], ((X,), {})),
    "arguments by name": ({"x": X}, ((), {"x": X})),
}


@pytest.mark.parametrize(("inputs", "expected"), FORMS.values(), ids=FORMS)
def test_inputs_may_have_any_usual_form(inputs: object, expected: tuple[object, object]) -> None:
    assert step_batch(inputs, has_loss_fn=False) == (*expected, None)
    assert step_batch((inputs, Y), has_loss_fn=True) == (*expected, Y)


@pytest.mark.parametrize("batch", [X, (X,), (X, Y, Y), {"x": X}])
def test_a_loss_function_needs_a_target(batch: object) -> None:
    with pytest.raises(RunError, match="inputs and a target"):
        step_batch(batch, has_loss_fn=True)


def test_names_must_be_strings() -> None:
    with pytest.raises(RunError, match="names of a batch must be strings"):
        step_batch({1: X}, has_loss_fn=False)


def test_tokens_are_whole_numbers_in_rows() -> None:
    assert size_of(Batch((torch.ones(3, 5, dtype=torch.long),), {})) == (3, 15)
    assert size_of(Batch((), {"x": X})) == (3, 0)
    assert size_of(Batch((1,), {})) == (0, 0)
