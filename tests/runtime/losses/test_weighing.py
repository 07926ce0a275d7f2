"""The weights of a step, among replicas too, and what is said where they are not certain."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock
from penstock.capture import capture
from penstock.errors import RunError
from penstock.runtime import Weighing
from tests.runtime.plans import quick_plan

X, T = torch.randn(5, 3), torch.randn(5, 3)


class Replicas:
    """Two replicas, of which the other one says what it is told to."""

    count = 2

    def __init__(self, others: Sequence[float]) -> None:
        self._others = torch.tensor(others, dtype=torch.float64)

    def sum(self, figures: Tensor) -> Tensor:
        """Figures summed over both."""
        return figures + self._others


def weighed(loss_fn: Callable[[Any, Any], Tensor], others: Sequence[float]) -> tuple[float, ...]:
    """The weights of microbatches of 3 and 2 samples beside another replica."""
    model = nn.Linear(3, 3)
    pipe = penstock.Pipeline(
        model, quick_plan(model, (X,), ranks=1, microbatches=2, schedule="gpipe"), loss_fn=loss_fn, local=True
    )
    weighing = Weighing(capture(model, (X,)), Replicas(others), loss_fn)  # type: ignore[arg-type]
    pipe._engine._loss_head._weighing = weighing  # type: ignore[attr-defined]
    return pipe.step(X, target=T).weights


def test_a_mean_counts_by_the_samples_of_all_replicas() -> None:
    assert weighed(functional.mse_loss, (3.0, 0.0, 0.0)) == pytest.approx((2 * 3 / 8, 2 * 2 / 8))


def test_a_sum_counts_once_in_every_replica() -> None:
    assert weighed(nn.MSELoss(reduction="sum"), (3.0, 1.0, 1.0)) == (1.0, 1.0)


def test_replicas_that_find_different_rules_are_refused() -> None:
    with pytest.raises(RunError, match=r"replicas of the pipeline find different rules for the loss \(.*rule: mean"):
        weighed(functional.mse_loss, (3.0, 1.0, 1.0))


def by_size(y: Tensor, t: Tensor) -> Tensor:
    """A mean over chosen entries, which is another kind of loss for two samples."""
    if len(y) == 2:
        return functional.mse_loss(y, t) + y.square().mean()
    return (y - t)[t > 0].square().mean()


def test_what_cannot_be_counted_everywhere_is_said_and_samples_count() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    plan = quick_plan(model, (X,), ranks=1, microbatches=2, schedule="gpipe")
    pipe = penstock.Pipeline(model, plan, loss_fn=by_size, local=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = pipe.step(X, target=T).weights
    assert found == pytest.approx((3 / 5, 2 / 5))
    assert any("cannot be counted in all microbatches" in str(one.message) for one in said)


def test_a_remark_points_to_the_line_of_the_step() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    plan = quick_plan(model, (X,), ranks=1, microbatches=2, schedule="gpipe")
    pipe = penstock.Pipeline(model, plan, loss_fn=functional.mse_loss, local=True)
    with pytest.warns(UserWarning, match="batch norm") as said:
        pipe.step(X, target=T)
    assert said[0].filename == __file__
