"""Trial: a loss is called on parts of a microbatch, which tells by its numbers how it is made of samples."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.capture import Microbatch
from penstock.runtime.losses.case import Case
from penstock.runtime.losses.trial import NO_LABELS, NOT_CUT, RANDOM, Trial, try_function

Y = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
T = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
MEAN, SUM = (2 / 5, 3 / 5), (1.0, 1.0)


def missing(y: Tensor) -> Tensor:
    return undefined(y)  # type: ignore[name-defined, no-any-return] # noqa: F821


def tried(loss_fn: Any, y: Any = Y, t: Any = T, size: int = 5, partner: Any = None, place: int = 0) -> Trial:
    others = [] if partner is None else [Microbatch((), {}, partner, len(partner))]
    pieces = [Microbatch((), {}, t, size), *others]
    return try_function(loss_fn, Case(pieces, 0, y), place)


def borne_out(trial: Trial) -> list[str]:
    """Which rules the evidence bears out."""
    assert trial.evidence is not None
    mean = [piece.size / sum(one.size for one in trial.pieces) for piece in trial.pieces]
    found = {"mean": trial.evidence.bears_out(mean), "sum": trial.evidence.bears_out([1.0, 1.0])}
    return [name for name, is_right in found.items() if is_right]


@pytest.mark.parametrize(
    ("loss_fn", "expected"),
    [
        (functional.mse_loss, ["mean"]),
        (functools.partial(functional.mse_loss, reduction="sum"), ["sum"]),
        (lambda y, t: (y - t).square().sum() * (1 / len(y)), ["mean"]),
        (lambda y, t: functional.mse_loss(y, t).exp(), []),
        (lambda y, t: (y - y.roll(1, 0)).square().mean(), []),
        (lambda y, t: functional.mse_loss(y, t, reduction="sum") + 3, []),
    ],
)
def test_numbers_tell_a_mean_from_a_sum_and_from_what_is_neither(loss_fn: Any, expected: list[str]) -> None:
    assert borne_out(tried(loss_fn)) == expected


def test_gradients_tell_where_values_do_not() -> None:
    def same_value(y: Tensor, t: Tensor) -> Tensor:
        total = (y - t).square().sum()
        return functional.mse_loss(y, t).detach() + total - total.detach()

    assert borne_out(tried(same_value)) == []
    assert borne_out(tried(lambda y, t: functional.mse_loss(y, t).exp() * 1e-3 + y.mean() * 0)) == []


def test_a_single_sample_is_tried_with_another_one() -> None:
    one, partner = Y[:1], T[1:2]
    assert borne_out(tried(functional.mse_loss, one, T[:1], 1, partner)) == ["mean"]
    assert borne_out(tried(nn.MSELoss(reduction="sum"), one, T[:1], 1, partner)) == ["sum"]
    assert borne_out(tried(lambda y, t: functional.mse_loss(y, t).exp(), one, T[:1], 1, partner)) == []
    trial = tried(functional.mse_loss, one, T[:1], 1, T[2:])
    assert torch.equal(trial.pieces[1].target, T[2:3])


def test_every_trial_cuts_elsewhere() -> None:
    cuts = [tried(functional.mse_loss, place=place).pieces[0].size for place in range(5)]
    assert cuts == [2, 3, 4, 1, 2]


@pytest.mark.parametrize(
    ("loss_fn", "target", "failure"),
    [
        (lambda y, t: functional.mse_loss(functional.dropout(y), t), T, RANDOM),
        (lambda y, t: y.mean() / 0.0, T, NO_LABELS),
        (lambda y, t: functional.mse_loss(y["a"], t) + y["b"].sum(), T, NOT_CUT),
        (lambda y, t: (y - t).square().mean(1).topk(5).values.mean(), T, "it does not take a part of a microbatch"),
        (lambda y, t: missing(y), T, "NameError"),
    ],
)
def test_what_cannot_be_tried_says_why(loss_fn: Any, target: Tensor, failure: str) -> None:
    y = {"a": Y, "b": torch.ones((), dtype=torch.float64)} if failure == NOT_CUT else Y
    trial = tried(loss_fn, y, target)
    assert trial.evidence is None
    assert failure in trial.failure
    assert trial.is_final is (failure != NO_LABELS)


class Moving(nn.Module):
    """A loss with a centre that follows the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(3, dtype=torch.float64))
        self.calls = 0

    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        """Squares around the centre."""
        loss = (y - t - self.centre).square().mean()
        self.centre.lerp_(y.detach().mean(0), 0.1)
        self.calls += 1
        return loss


def test_a_trial_leaves_nothing_behind() -> None:
    y, t, loss_fn, state = Y.clone().requires_grad_(), T.clone(), Moving(), torch.get_rng_state()
    assert borne_out(tried(loss_fn, y * 1.0, t)) == ["mean"]
    assert (loss_fn.calls, float(loss_fn.centre.abs().max()), y.grad) == (0, 0.0, None)
    assert torch.equal(torch.get_rng_state(), state)
    tried(lambda y, t: (y.sub_(t)).square().mean() + t.add_(1).mean(), y * 1.0, t)
    assert torch.equal(t, T)


def test_another_dimension_may_hold_the_samples() -> None:
    assert borne_out(tried(lambda y, t: functional.mse_loss(y.t(), t), Y.t())) == ["mean"]
