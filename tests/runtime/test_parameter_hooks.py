"""Hooks on parameters see the gradient of every microbatch, as in plain accumulation, and a warning says so."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock
from tests.parity import WholeModel, accumulate, assert_identical, values
from tests.plans import quick_plan
from tests.process_pool import Pools
from tests.small_models import WIDTH, chain, noise

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
    return trained(model, plan, local=True)


def trained(model: nn.Module, plan: penstock.Plan, local: bool) -> tuple[Any, list[str]]:
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, local=local)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = [pipe.step(X, target=TARGET).loss for _ in range(3)]
    return values(model, losses), [str(warning.message) for warning in caught]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb_h1", "zbv"])
def test_a_nonlinear_hook_acts_as_in_accumulation_and_is_warned_of_once(schedule: str) -> None:
    model, plain = hooked(), hooked()
    found, warned = stepped(model, schedule)
    assert_identical(found, accumulate(WholeModel(plain, mse_loss, microbatches=3), X, target=TARGET, steps=3))
    (text,) = warned
    assert "hooks on parameters are called once per microbatch" in text
    assert text.partition(": ")[2].startswith("0.linear.weight, 3.linear.bias")


def warnings_of_a_rank(plan: penstock.Plan) -> list[str]:
    return trained(hooked(), plan, local=False)[1]


def test_one_warning_names_the_parameters_of_all_ranks(pools: Pools) -> None:
    plan = quick_plan(hooked(), (X,), ranks=2, microbatches=3, schedule="1f1b")
    first, second = pools[2].run(warnings_of_a_rank, plan)
    (text,) = first
    assert text.partition(": ")[2].startswith("0.linear.weight, 3.linear.bias")
    assert second == []


def test_without_hooks_there_is_no_warning() -> None:
    assert stepped(chain(4), "1f1b")[1] == []


def test_an_optimizer_in_a_hook_is_named_in_the_error() -> None:
    model = chain(4)
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    plan = quick_plan(model, (X,), ranks=2, microbatches=3, schedule="gpipe")
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, local=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(penstock.RunError, match=r"(?s)modified by an inplace operation.*try: if a hook changes"):
            pipe.step(X, target=TARGET)
