"""The weights of microbatches among those of other replicas."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.batches import Microbatch, SampleAxis
from penstock.capture import capture
from penstock.errors import RunError
from penstock.loss import LossStep, LossWeights
from penstock.loss.detect_reduction import Decision
from penstock.loss.replicas import weights_among_replicas

CLASSES = torch.tensor([0.5, 2.0, 1.0, 0.25, 3.0], dtype=torch.float64)
LABELS = torch.tensor([[0, 1, 2], [3, -100, -100], [4, 4, -100], [1, 0, 2], [2, 3, 1]])
FULL = LABELS.clamp(min=0)
VALUES = torch.randn(5, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Batch = Sequence[Sequence[int]]
AXES = {"target": SampleAxis(0)}


def entropy(y: Tensor, t: Tensor, **options: Any) -> Tensor:
    return functional.cross_entropy(y.flatten(0, 1), t.flatten(), **options)


class Together:
    """Replicas that are threads of this process."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._given: list[Tensor] = []
        self._barrier = threading.Barrier(count, timeout=60)

    def sum(self, figures: Tensor) -> Tensor:
        """Figures summed over all threads."""
        self._given.append(figures)
        self._barrier.wait()
        total = torch.stack(self._given).sum(0)
        # Cleared by one thread, after all have read and before any gives the next figures.
        if self._barrier.wait() == 0:
            self._given.clear()
        self._barrier.wait()
        return total


def weights(
    loss_fns: Sequence[Callable[[Any, Any], Tensor]], target: Tensor, batches: Sequence[Batch], **options: Any
) -> list[tuple[float, ...]]:
    """The weights of the microbatches, given by their rows, of every replica with its own loss function."""
    captured, replicas = capture(nn.Linear(1, 1), (torch.zeros(2, 1),)), Together(len(batches))

    def found(loss_fn: Callable[[Any, Any], Tensor], rows: Batch) -> tuple[float, ...]:
        microbatches = [Microbatch((), {}, target[list(own)], len(own), AXES) for own in rows]
        step = LossStep(microbatches, [captured.example_recording] * len(rows), True)
        own = LossWeights(captured, replicas, loss_fn, **options)
        output = VALUES[list(rows[0])].clone().requires_grad_()
        own.weigh(step, 0, output, loss_fn(output, microbatches[0].target))
        return own.weights(step)

    with ThreadPoolExecutor(len(batches)) as threads:
        return list(threads.map(found, loss_fns, batches))


def gradient(loss_fn: Callable[[Any, Any], Tensor], target: Tensor, batches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
    """The gradient of the whole batch, and the mean over replicas of the weighted gradients of their microbatches."""
    y = VALUES.clone().requires_grad_()
    rows = [row for batch in batches for own in batch for row in own]
    (expected,) = torch.autograd.grad(loss_fn(y[rows], target[rows]), y)
    found = torch.zeros_like(y)
    for batch, own_weights in zip(batches, weights([loss_fn] * len(batches), target, batches), strict=True):
        for own, weight in zip(batch, own_weights, strict=True):
            loss = loss_fn(y[list(own)], target[list(own)]) * (weight / len(batches))
            found += torch.autograd.grad(loss, y)[0]
    return expected, found


@pytest.mark.parametrize("batches", [[[[0, 1], [2]], [[3, 4]]], [[[0]], [[1]]], [[[0, 3]], [[4]], [[1], [2]]]])
@pytest.mark.parametrize(
    ("loss_fn", "target"),
    [
        (functional.mse_loss, VALUES.clone()),
        (entropy, LABELS),
        (entropy, FULL),
        (lambda y, t: entropy(y, t, weight=CLASSES), LABELS),
        (lambda y, t: entropy(y, t, ignore_index=4), FULL),
        (lambda y, t: -y.log_softmax(-1).gather(-1, t.clamp(min=0).unsqueeze(-1)).mean(), LABELS),
    ],
)
def test_the_gradients_of_all_replicas_average_to_those_of_the_whole_batch(
    loss_fn: Any, target: Tensor, batches: Any
) -> None:
    expected, found = gradient(loss_fn, target, batches)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


def test_a_sum_counts_once_in_every_replica() -> None:
    found = weights([nn.MSELoss(reduction="sum")] * 2, VALUES, [[[0, 1], [2]], [[3, 4]]])
    assert found == [(1.0, 1.0), (1.0,)]


def test_a_reduction_that_is_given_counts_in_all_replicas() -> None:
    batches = [[[0], [1]], [[2]]]
    found = weights([entropy] * 2, LABELS, batches, reduction="mean")
    assert found == [pytest.approx((2 / 3, 2 / 3)), pytest.approx((2 / 3,))]
    found = weights([entropy] * 2, LABELS, batches, reduction="tokens")
    assert found == [pytest.approx((2 * 3 / 6, 2 * 1 / 6)), pytest.approx((2 * 2 / 6,))]


class Alike:
    """Five replicas that all give the same numbers."""

    count = 5

    def sum(self, values: Tensor) -> Tensor:
        """The values of all replicas."""
        return torch.stack([values] * self.count).sum(0)


@pytest.mark.parametrize("length", [7, 25_165_825, 50_000_001, 99_532_800])
def test_replicas_agree_on_the_weights_of_samples_of_any_size(length: int) -> None:
    piece = {"target": torch.zeros(1).expand(1, length)}, 1
    assert weights_among_replicas(Alike(), Decision(None), (0.5, 0.5), [piece], "") == ((1.0,), "")


def test_replicas_whose_losses_are_averaged_in_different_ways_are_refused() -> None:
    with pytest.raises(RunError, match="disagree about how the loss is averaged"):
        weights([nn.MSELoss(), nn.MSELoss(reduction="sum")], VALUES, [[[0], [1]], [[2], [3]]])
