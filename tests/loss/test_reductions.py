"""Weights that are counted, and the weighted sum of losses."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.batches import Microbatch, SampleAxis
from penstock.capture import capture
from penstock.errors import RunError
from penstock.loss import LossStep, LossWeights, weighted_sum
from tests.loss.test_models import OneReplica

LABELS = torch.tensor([[0, 1, 2], [3, -100, -100], [-100, -100, -100], [1, 0, 2]])
Y = torch.randn(4, 3, 5)
AXES = {"target": SampleAxis(0)}


def entropy(y: Tensor, t: Tensor) -> Tensor:
    return functional.cross_entropy(y.flatten(0, 1), t.flatten())


def weights(target: Tensor, reduction: str | None = None) -> tuple[float, ...]:
    """The weights of single samples."""
    captured = capture(nn.Linear(1, 1), (torch.zeros(1, 1),))
    microbatches = [Microbatch((), {}, own, 1, AXES) for own in target.split(1)]
    step = LossStep(microbatches, [captured.example_recording] * len(microbatches), True)
    own = LossWeights(captured, OneReplica(), entropy, reduction)
    own.weigh(step, 0, Y[:1], entropy(Y[:1], target[:1]))
    return own.weights(step)


def test_labels_are_counted_and_a_microbatch_without_any_has_no_weight() -> None:
    assert weights(LABELS) == (3 / 7, 1 / 7, 0.0, 3 / 7)


def test_a_batch_without_labels_has_no_loss() -> None:
    labels = LABELS[[2, 2]]
    assert entropy(Y[:2], labels).isnan()
    assert weighted_sum([entropy(Y[:1], own) for own in labels.split(1)], weights(labels, "tokens")).isnan()


def test_the_user_may_give_the_reduction() -> None:
    assert weights(LABELS, "mean") == (0.25,) * 4
    assert weights(LABELS, "sum") == (1.0,) * 4
    assert weights(LABELS, "tokens") == (3 / 7, 1 / 7, 0.0, 3 / 7)
    with pytest.raises(RunError, match=r"reduction must be .* or None .got: 'total'"):
        weights(LABELS, "total")


def test_labels_that_are_not_there_cannot_be_counted() -> None:
    captured = capture(nn.Linear(1, 1), (torch.zeros(1, 1),))
    microbatches = [Microbatch((), {}, own, 1, AXES) for own in Y[:2].split(1)]
    step = LossStep(microbatches, [captured.example_recording] * 2, True)
    with pytest.raises(RunError, match="requires labels to count"):
        LossWeights(captured, OneReplica(), functional.mse_loss, "tokens").weigh(step, 0, Y[:1], torch.zeros(()))


def test_a_loss_without_weight_is_left_out_even_if_it_is_nan() -> None:
    found = weighted_sum([torch.tensor(2.0), torch.tensor(math.nan), torch.tensor(6.0)], (0.75, 0.0, 0.25))
    assert found == 3.0
