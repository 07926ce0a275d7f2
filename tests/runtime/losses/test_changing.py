"""A loss function that is another from step to step stays exact, and is called no more often than is said."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock
from tests.runtime.losses.table import ALL, CLASSES, LABELS, PLACES, SAMPLES, VALUES, WEIGHTS, flat, numbers
from tests.runtime.plans import quick_plan

X = numbers(SAMPLES, PLACES, 4, seed=0)


class Epoch:
    """What a training loop counts."""

    number = 0


@pytest.fixture(autouse=True)
def _from_the_beginning() -> None:
    Epoch.number = 0


def annealed(y: Tensor, t: Tensor) -> Tensor:
    return functional.mse_loss(y, t, reduction="mean" if Epoch.number < 2 else "sum")


def other_ignored(y: Tensor, t: Tensor) -> Tensor:
    return flat(y, t, ignore_index=0 if Epoch.number < 2 else 1)


def growing_weights(y: Tensor, t: Tensor) -> Tensor:
    return flat(y, t, weight=torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0 + 3 * Epoch.number], dtype=torch.float64))


def growing_threshold(y: Tensor, t: Tensor) -> Tensor:
    mask = t > 0.2 * Epoch.number
    return ((y - t).square() * mask).sum() / mask.sum()


def chosen_by_threshold(y: Tensor, t: Tensor) -> Tensor:
    return (y - t)[t > 0.2 * Epoch.number].square().mean()


class Replaced:
    """Class weights that are another tensor after a while."""

    def __call__(self, y: Tensor, t: Tensor) -> Tensor:
        """The mean over labels."""
        self.weights = WEIGHTS if Epoch.number < 2 else WEIGHTS.flip(0)
        return flat(y, t, weight=self.weights)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()


def pipeline(loss_fn: Any, microbatches: int = 3, **options: Any) -> tuple[nn.Module, penstock.Pipeline]:
    own = model()
    plan = quick_plan(own, (X,), ranks=2, microbatches=microbatches, schedule="1f1b")
    return own, penstock.Pipeline(own, plan, loss_fn=loss_fn, local=True, **options)


@pytest.mark.parametrize(
    ("loss_fn", "target"),
    [
        (annealed, VALUES),
        (other_ignored, ALL),
        (growing_weights, LABELS),
        (growing_threshold, VALUES),
        (chosen_by_threshold, VALUES),
        (Replaced(), LABELS),
    ],
)
def test_every_step_has_the_gradients_of_the_whole_batch(loss_fn: Any, target: Tensor) -> None:
    own, pipe = pipeline(loss_fn)
    plain = copy.deepcopy(own)
    for Epoch.number in range(5):
        own.zero_grad()
        plain.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = pipe.step(X, target=target).loss
        expected = loss_fn(plain(X), target)
        expected.backward()
        torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=0)
        for one, other in zip(own.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-11, atol=1e-14)


def test_counts_that_change_behind_the_first_microbatch_are_said_to_be_wrong_and_then_right() -> None:
    own, pipe = pipeline(growing_threshold, SAMPLES)
    said, errors = [], []
    for Epoch.number in range(5):
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            found = pipe.step(X, target=VALUES).loss
        said.append(len(heard))
        errors.append(abs(float(found - growing_threshold(own(X), VALUES).detach())) > 1e-12)
    assert sum(said) == 1
    assert [number > 0 for number in said] == errors


def test_samples_that_begin_to_act_on_each_other_are_remarked_in_that_step() -> None:
    _, pipe = pipeline(lambda y, t: functional.mse_loss(y - y.mean(0) if Epoch.number else y, t))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe.step(X, target=VALUES)
    Epoch.number = 1
    with pytest.warns(UserWarning, match="taken over all samples"):
        pipe.step(X, target=VALUES)


def test_a_function_that_goes_several_ways_in_one_step_is_remarked() -> None:
    calls: list[int] = []

    def by_turns(y: Tensor, t: Tensor) -> Tensor:
        calls.append(1)
        return functional.mse_loss(y, t, reduction="sum" if len(y) == 2 else "mean")

    _, pipe = pipeline(by_turns)
    with pytest.warns(UserWarning, match="another way for some microbatches|not made of those of its parts"):
        pipe.step(X, target=VALUES)


def counting(loss_fn: Callable[[Any, Any], Tensor]) -> tuple[list[bool], Callable[[Any, Any], Tensor]]:
    calls: list[bool] = []

    def called(y: Tensor, t: Tensor) -> Tensor:
        calls.append(True)
        return loss_fn(y, t)

    return calls, called


def test_a_function_is_called_five_times_more_at_first_and_three_in_steps_that_are_powers_of_two() -> None:
    calls, loss_fn = counting(functional.mse_loss)
    _, pipe = pipeline(loss_fn)
    found = []
    for _ in range(9):
        before = len(calls)
        pipe.step(X, target=VALUES)
        pipe.eval(X, target=VALUES)
        found.append(len(calls) - before - 6)
    assert found == [5, 3, 0, 3, 0, 0, 0, 3, 0]


def test_a_reduction_that_is_given_is_not_tried() -> None:
    calls, loss_fn = counting(functional.mse_loss)
    _, pipe = pipeline(loss_fn, reduction="sum")
    for _ in range(2):
        pipe.step(X, target=VALUES)
    assert len(calls) == 2 + 2 * 3


def test_a_random_loss_is_read_and_not_tried() -> None:
    _, pipe = pipeline(lambda y, t: functional.mse_loss(functional.dropout(y, 0.5), t, reduction="sum"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pipe.step(X, target=VALUES).weights == (1.0, 1.0, 1.0)


def test_a_random_loss_that_cannot_be_read_is_remarked() -> None:
    _, pipe = pipeline(lambda y, t: torch.einsum("bij,bij->", functional.dropout(y), t))
    with pytest.warns(UserWarning, match="it draws random numbers"):
        pipe.step(X, target=VALUES)


def test_a_first_microbatch_without_labels_is_no_obstacle() -> None:
    target = LABELS.flip(0)
    own, pipe = pipeline(lambda y, t: flat(y, t), SAMPLES)
    plain = copy.deepcopy(own)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = pipe.step(X, target=target).loss
    torch.testing.assert_close(found, flat(plain(X), target).detach(), rtol=1e-12, atol=0)


class Fused(torch.autograd.Function):
    """Cross entropy that shows nothing of itself, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean over labels that are not ignored."""
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            loss = flat(leaf, labels)
        (ctx.gradient,) = torch.autograd.grad(loss, leaf)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor, None]:
        """What was computed already."""
        return ctx.gradient * factor, None


def fused(y: Tensor, t: Tensor) -> Tensor:
    return Fused.apply(y, t)  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize("microbatches", [3, SAMPLES])
def test_labels_that_are_ignored_later_are_counted_by_a_function_that_shows_nothing(microbatches: int) -> None:
    own, pipe = pipeline(fused, microbatches)
    gaps = [ALL, ALL, ALL, ALL.clone(), LABELS.roll(1, 0)]
    gaps[3][-1, 2:] = -100
    for target in gaps:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = pipe.step(X, target=target).loss
        torch.testing.assert_close(found, flat(own(X), target).detach(), rtol=1e-12, atol=0)


def test_a_function_that_shows_nothing_is_not_called_more_often_without_need() -> None:
    calls, loss_fn = counting(fused)
    _, pipe = pipeline(loss_fn)
    for _ in range(7):
        pipe.step(X, target=ALL)
    assert len(calls) == 7 * 3 + 5
