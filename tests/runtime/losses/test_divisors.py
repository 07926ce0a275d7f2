"""The autograd graph of a loss tells by what its terms were divided."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from penstock.runtime.losses.divisors import live_terms
from penstock.runtime.losses.nodes import couples_rows

Y = torch.randn(3, 4, 5, requires_grad=True)
T = torch.tensor([[0, 1, -100, 2], [-100, -100, 3, 4], [1, 1, 1, -100]])
WEIGHT = nn.Parameter(torch.randn(4, 5))
SCALE = nn.Parameter(torch.ones(()))


def ce(y: Tensor, **options: Any) -> Tensor:
    return functional.cross_entropy(y.transpose(1, 2), T, **options)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda y: y.mean(), [("mean", 60)]),
        (lambda y: y.sum(), [("sum", 1)]),
        (lambda y: y.mean((1, 2)).sum(), [("sum", 1)]),
        (lambda y: y.sum(-1).mean(), [("mean", 12)]),
        (lambda y: y.mean(0).sum(), [("mean", 3)]),
        (lambda y: y.sum(0).div(3).sum(), [("sum", 3)]),
        (lambda y: y.exp().sum() * 0.5 / 4, [("sum", 8)]),
        (lambda y: -(y.sum() / torch.tensor(7)).reshape(1).squeeze(), [("sum", 7)]),
        (lambda y: functional.mse_loss(y, y.detach()), [("mean", 60)]),
        (lambda y: functional.mse_loss(y, y.detach(), reduction="sum"), [("sum", 1)]),
        (lambda y: ce(y), [("mean", 8)]),
        (lambda y: ce(y, reduction="sum") / (T >= 0).sum(), [("sum", 8)]),
        (lambda y: ce(y) + 2 * y.mean(), [("mean", 8), ("mean", 30)]),
        (lambda y: torch.stack([ce(y), y.sum()]).mean(), [("mean", 16), ("sum", 2)]),
        (lambda y: ce(y) + WEIGHT.square().sum(), [("mean", 8), ("constant", 1)]),
        (lambda y: ce(y) + (WEIGHT @ WEIGHT.t()).norm() - SCALE, [("mean", 8), ("constant", 1), ("constant", 1)]),
        (lambda y: ce(y) - 3.0, [("mean", 8)]),
        (lambda y: torch.einsum("bij,bij->", y, y) / 5 + y.norm(), [("unknown", 5), ("unknown", 1)]),
    ],
)
def test_terms_and_divisors_are_read(loss: Any, expected: list[tuple[str, float]]) -> None:
    found = live_terms(loss(Y))
    assert found is not None
    assert [(term.kind, round(term.divisor or 0, 6)) for term in found] == expected


@pytest.mark.parametrize(
    "loss",
    [
        lambda y: y.mean().exp(),
        lambda y: y.mean() * y.sum(),
        lambda y: y.mean() / y.sum(),
        lambda y: 1 / y.mean(),
        lambda y: ce(y) * SCALE,
        lambda y: y.detach().mean(),
    ],
)
def test_what_is_no_sum_of_sums_is_not_read(loss: Any) -> None:
    assert live_terms(loss(Y)) is None


def test_a_number_of_each_sample_is_not_looked_into() -> None:
    each = torch.stack([row.mean() for row in Y])
    assert live_terms(each.mean(), 3) is None
    assert len(live_terms(each.mean()) or ()) == 3


def test_inside_a_checkpoint_nothing_is_computed_again() -> None:
    calls = []

    def block(y: Tensor) -> Tensor:
        calls.append(1)
        return ce(y, weight=torch.ones(5))

    (term,) = live_terms(checkpoint(block, Y, use_reentrant=False)) or ()
    assert (term.kind, term.divisor, len(calls)) == ("mean", None, 1)


def test_a_sum_over_its_own_size_may_be_a_mean() -> None:
    def may_be(loss: Tensor) -> bool:
        (term,) = live_terms(loss) or ()
        return term.may_be_mean

    assert may_be(Y.sum() / 3)
    assert may_be(Y.sum() / 60)
    assert may_be(Y.sum() * (1 / 3))
    assert not may_be(Y.sum() / 10)
    assert not may_be(Y.sum())


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (lambda y: y.mean(0).square().sum(), True),
        (lambda y: (y.softmax(-1).mean(0) * torch.rand(4, 5)).sum(), True),
        (lambda y: y.softmax(0).square().mean(), True),
        (lambda y: y.mean(0).sum() * 2, False),
        (lambda y: y.square().mean(1).sum(), False),
        (lambda y: (y @ torch.rand(5, 5, requires_grad=True)).square().mean(), False),
    ],
)
def test_what_is_taken_over_rows_before_is_seen(value: Any, expected: bool) -> None:
    assert couples_rows(value(Y)) is expected
