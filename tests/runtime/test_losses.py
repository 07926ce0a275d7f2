"""The loss of a batch and its gradients do not depend on how the batch is cut, whatever the loss is divided by."""

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock
from tests.parity import WholeModel, assert_close, values
from tests.plans import quick_plan
from tests.selection import alternated
from tests.small_models import CLASSES, WIDTH, classifier, noise, tied, token_loss, tokens
from tests.zoo import ZOO

SCHEDULES = ("1f1b", "zbv")
IGNORED = -100
FLOAT32 = 1e-5
"""Hugging Face models take their loss from scores in float32"""


def labels_with_gaps(rows: int, length: int = 6) -> Tensor:
    """Labels of which every row ignores another number; those of row 1 are ignored altogether."""
    labels = tokens(rows, length, seed=3)
    ends = torch.tensor([(0 if row == 1 else 1 + 5 * row % length) for row in range(rows)])
    return labels.masked_fill(torch.arange(length) >= ends.unsqueeze(1), IGNORED)


def step_and_compare(model: nn.Module, loss_fn: Any, x: Tensor, target: Tensor, schedule: str, **options: Any) -> None:
    plain = copy.deepcopy(model)
    expected = [WholeModel(plain, loss_fn).step(x, target=target).loss]
    plan = quick_plan(model, (x,), ranks=2, microbatches=4, schedule=schedule)
    result = penstock.Pipeline(model, plan, loss_fn=loss_fn, local=True, **options).step(x, target=target)
    assert_close(values(model, [result.loss]), values(plain, expected))


@pytest.mark.parametrize(("rows", "schedule"), alternated(list(product([1, 2, 3, 7, 8], SCHEDULES))))
def test_a_mean_over_samples(schedule: str, rows: int) -> None:
    step_and_compare(classifier(), functional.mse_loss, noise(rows, WIDTH), noise(rows, CLASSES, seed=1), schedule)


@pytest.mark.parametrize(("rows", "schedule"), alternated(list(product([1, 3, 7, 8], SCHEDULES))))
def test_a_mean_over_labels_that_count(schedule: str, rows: int) -> None:
    """With 7 or 8 rows and 4 microbatches some have few labels, with 3 rows one microbatch has none."""
    step_and_compare(tied(), token_loss, tokens(rows, 6), labels_with_gaps(rows), schedule)


@pytest.mark.parametrize(("rows", "schedule"), alternated(list(product([2, 7], SCHEDULES))))
def test_a_mean_over_weighted_classes(schedule: str, rows: int) -> None:
    importance = noise(CLASSES, seed=8).abs()
    loss_fn = nn.CrossEntropyLoss(weight=importance)
    step_and_compare(classifier(), loss_fn, noise(rows, WIDTH), tokens(rows, below=CLASSES), schedule)


SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a function": lambda output, target: functional.mse_loss(output, target, reduction="sum"),
    "a module": nn.MSELoss(reduction="sum"),
    "by hand": lambda output, target: ((output - target) ** 2).sum(),
}


@pytest.mark.parametrize(("name", "schedule"), alternated(list(product(SUMS, SCHEDULES))))
def test_a_sum(schedule: str, name: str) -> None:
    step_and_compare(classifier(), SUMS[name], noise(7, WIDTH), noise(7, CLASSES, seed=1), schedule)


def test_a_sum_that_only_the_user_knows_of() -> None:
    loss_fn = SUMS["by hand"]
    step_and_compare(classifier(), loss_fn, noise(7, WIDTH), noise(7, CLASSES, seed=1), "1f1b", reduction="sum")


def test_labels_are_counted_if_the_user_asks_for_it() -> None:
    step_and_compare(tied(), token_loss, tokens(7, 6), labels_with_gaps(7), "1f1b", reduction="tokens")


def language_model(name: str) -> nn.Module:
    model = ZOO[name]()[0].double().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def padded_batch(rows: int) -> dict[str, Tensor]:
    ids = tokens(rows, 6, seed=5, below=90) + 4
    ends = torch.tensor([[max(1, 6 - row % 4)] for row in range(rows)])
    mask = (torch.arange(6) < ends).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORED)}


@pytest.mark.parametrize("rows", [2, 5])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_model_that_returns_its_loss(name: str, rows: int) -> None:
    model, batch = language_model(name), padded_batch(rows)
    plan = quick_plan(model, kwargs=batch, ranks=2, microbatches=4, schedule="1f1b")
    loss = penstock.Pipeline(model, plan, local=True).step(**batch).loss
    found = values(model, [loss])
    model.zero_grad()
    expected = model(**batch, use_cache=False).loss
    expected.backward()
    assert_close(found, values(model, [expected.detach()]), FLOAT32)


def test_a_model_that_returns_its_loss_for_a_microbatch_without_labels() -> None:
    model, batch = language_model("llama"), padded_batch(4)
    batch["labels"][2] = IGNORED
    plan = quick_plan(model, kwargs=batch, ranks=2, microbatches=4, schedule="1f1b")
    result = penstock.Pipeline(model, plan, local=True).step(**batch)
    found = values(model, [result.loss])
    model.zero_grad()
    expected = model(**batch, use_cache=False).loss
    expected.backward()
    assert result.weights[2] == 0
    assert_close(found, values(model, [expected.detach()]), FLOAT32)
