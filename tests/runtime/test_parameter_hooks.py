"""Hooks on parameters see the gradient of every microbatch, as in a plain loop, and that is remarked."""

import warnings
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock
from tests.runtime.models import WIDTH, chain, noise
from tests.runtime.oracle import assert_identical, loop, numbers
from tests.runtime.plans import quick_plan

X, TARGET = noise(7, WIDTH), noise(7, WIDTH, seed=1)


def clamped(gradient: Tensor) -> Tensor:
    return gradient.clamp(-1e-2, 1e-2)


def hooked() -> nn.Module:
    model = chain(4)
    model[0].linear.weight.register_hook(clamped)
    model[3].linear.bias.register_hook(clamped)
    return model


def stepped(model: nn.Module, schedule: str) -> tuple[Any, list[str]]:
    plan = quick_plan(model, (X,), ranks=2, microbatches=3, schedule=schedule)
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, local=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        losses = [pipe.step(X, target=TARGET).loss for _ in range(3)]
    return numbers(model, losses), [str(one.message) for one in said]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb_h1", "zbv"])
def test_a_hook_that_is_not_linear_acts_as_in_a_loop_and_is_remarked_once(schedule: str) -> None:
    model, plain = hooked(), hooked()
    found, said = stepped(model, schedule)
    train = loop(plain, mse_loss, 3)
    assert_identical(found, numbers(plain, [train(X, TARGET) for _ in range(3)]))
    (text,) = said
    assert "hooks on parameters are called once per microbatch" in text
    assert text.partition(": ")[2].startswith("0.linear.weight, 3.linear.bias")


def test_without_hooks_nothing_is_said() -> None:
    assert stepped(chain(4), "1f1b")[1] == []
