"""NaN or Inf in a weight, an input or a target is named as the cause, with a hint that fits."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock
from tests.plans import quick_plan
from tests.small_models import WIDTH, chain, noise, seeded

X, TARGET = noise(6, WIDTH), noise(6, WIDTH, seed=1)
IN_BATCH = "\ntry: a batch without NaN and Inf"
IN_WEIGHTS = "\ntry: weights from before an earlier step broke them: pipe.load"


def failure(model: nn.Module, x: Tensor, target: Tensor) -> str:
    plan = quick_plan(model, (X,), ranks=2, microbatches=2, schedule="1f1b")
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, local=True)
    with pytest.raises(penstock.RunError) as caught:
        pipe.step(x, target=target)
    return str(caught.value)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("block", [0, 3])
def test_a_weight_is_named(value: str, block: int) -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH).double() for _ in range(4)))
    with torch.no_grad():
        model[block].weight[0, 0] = float(value)
    text = failure(model, X, TARGET)
    assert f"first not finite: the parameter {block}.weight" in text
    assert IN_WEIGHTS in text


class Gate(nn.Module):
    """A block that hides an infinite weight from its output: the tanh of Inf is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        return torch.tanh(self.linear(x) * self.factor)


def test_a_weight_that_breaks_only_the_backward_is_named() -> None:
    model = seeded(nn.Sequential(*(Gate() for _ in range(4))))
    with torch.no_grad():
        model[1].factor.fill_(float("inf"))
    text = failure(model, X, TARGET)
    assert "during: backward, first not finite: the parameter 1.factor" in text
    assert IN_WEIGHTS in text


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_an_input_is_named_and_not_blamed_on_the_learning_rate(value: str) -> None:
    x = X.clone()
    x[4, 0] = float(value)
    text = failure(chain(4), x, TARGET)
    assert "first not finite: the input input, microbatch: 1" in text
    assert IN_BATCH in text
    assert "learning rate" not in text


def test_a_target_is_named() -> None:
    target = TARGET.clone()
    target[0, 0] = float("nan")
    text = failure(chain(4), X, target)
    assert "first not finite: the target, microbatch: 0" in text
    assert IN_BATCH in text


def test_a_loss_of_finite_values_is_the_loss() -> None:
    text = failure(chain(4), X, torch.full_like(TARGET, 1e200))
    assert "first not finite: the loss" in text
    assert "try: a smaller learning rate" in text


@pytest.mark.parametrize("call", ["step", "evaluate"])
def test_a_target_by_position_gets_the_right_call(call: str) -> None:
    model: Any = chain(4)
    plan = quick_plan(model, (X,), ranks=2, microbatches=2, schedule="1f1b")
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, local=True)
    words = r"too many positional arguments\)\ntry: .*\(input\); a target .* by name: pipe\.step\(x, target=y\)"
    with pytest.raises(penstock.CaptureError, match=words):
        getattr(pipe, call)(X, TARGET)
