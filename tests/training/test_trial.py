"""Trial: a loss function that looks like one rule and follows another is found out by its numbers."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock

X, Y = torch.randn(12, 6, dtype=torch.float64), torch.randn(12, 6, dtype=torch.float64)


def pipeline(loss_fn):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)]).double()
    plan = penstock.plan(model, (X,), ranks=2, microbatches=3, schedule="1f1b")
    return model, penstock.Pipeline(model, plan, loss_fn=loss_fn, local=True)


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda out, y: (out - y).square().sum() * (1 / len(out)),
        lambda out, y: (out - y).square().sum(0).div(len(out)).sum(),
        lambda out, y: (out - y).square().mean(1).sum(),
        lambda out, y: (out - y).square().sum() / torch.tensor(float(len(out))),
        lambda out, y: functional.mse_loss(out, y).reshape(1),
    ],
    ids=["times the inverse", "each column", "mean then sum", "over a tensor", "of shape one"],
)
def test_gradients_are_those_of_the_whole_batch(loss_fn):
    model, pipe = pipeline(loss_fn)
    loss = pipe.step(X, target=Y).loss
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    expected = loss_fn(model(X), Y)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach().reshape(()))
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda out, y: (out - y).square().mean(1).topk(2).values.mean(),
        lambda out, y: (out - out.roll(1, 0)).square().mean(),
        lambda out, y: torch.pdist(out).mean(),
        lambda out, y: (out - y).square().sum() / (len(out) - 1),
    ],
    ids=["topk", "neighbours", "pairs", "degrees of freedom"],
)
def test_samples_that_act_on_each_other_are_remarked(loss_fn):
    _, pipe = pipeline(loss_fn)
    with pytest.warns(UserWarning, match="samples act on each other"):
        pipe.step(X, target=Y)


@pytest.mark.parametrize("loss_fn", [functional.mse_loss, nn.L1Loss(), nn.MSELoss(reduction="sum")])
def test_ordinary_losses_are_not_remarked(loss_fn):
    _, pipe = pipeline(loss_fn)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe.step(X, target=Y)
