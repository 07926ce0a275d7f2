"""What a user changes in a model between two steps holds from the next step on, on every rank."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock
from tests.runtime.models import WIDTH, Block, fixed, noise
from tests.runtime.oracle import Numbers, assert_equal, loop, numbers
from tests.runtime.plans import quick_plan
from tests.runtime.workers import Pools

X, TARGET = noise(6, WIDTH), noise(6, WIDTH, seed=1)
SCHEDULES = ("1f1b", "zb_h1", "zbv")


def normalised() -> nn.Module:
    """Blocks with batch norm and dropout."""
    parts = (nn.Sequential(Block(), nn.BatchNorm1d(WIDTH), nn.Dropout(0.0)) for _ in range(4))
    return fixed(nn.Sequential(*parts))


def frozen(model: nn.Module) -> None:
    model[0].requires_grad_(False)


def thawed(model: nn.Module) -> None:
    model[0].requires_grad_(True)


def evaluating(model: nn.Module) -> None:
    model[1].eval()


def weights_changed(model: nn.Module) -> None:
    with torch.no_grad():
        model[2][0].linear.weight.mul_(0.5)


def hooked(model: nn.Module) -> None:
    model[3].register_forward_hook(lambda module, given, result: result * 2)


CHANGES = (frozen, thawed, evaluating, weights_changed, hooked)


def changed(take: Any, model: nn.Module, held: Any) -> list[Numbers]:
    """The numbers after a step that follows each change."""
    found = []
    for change in CHANGES:
        change(model)
        for parameter in model.parameters():
            parameter.grad = None
        loss = take(X, TARGET)
        copied = numbers(held, [loss]).items()
        found.append({name: None if value is None else value.clone() for name, value in copied})
    return found


def changed_pipeline(schedule: str, local: bool = False) -> list[Numbers]:
    model = normalised()
    plan = quick_plan(model, (X,), ranks=2, microbatches=2, schedule=schedule)
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, local=local)
    return changed(lambda x, target: pipe.step(x, target=target).loss, model, pipe)


def changed_plainly() -> list[Numbers]:
    model = normalised()
    return changed(loop(model, mse_loss, 2), model, model)


@pytest.mark.filterwarnings("ignore:batch norm")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_sees_what_was_changed(schedule: str) -> None:
    for found, expected in zip(changed_pipeline(schedule, local=True), changed_plainly(), strict=True):
        assert_equal(found, expected)


@pytest.mark.gloo
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_processes_see_what_was_changed(pools: Pools, schedule: str) -> None:
    for first, second, expected in zip(*pools[2].run(changed_pipeline, schedule), changed_plainly(), strict=True):
        assert_equal(first | second, expected)


class Failing(nn.Module):
    """Fails when it is told to."""

    fails = False

    def forward(self, x: Any) -> Any:
        """As it came."""
        if self.fails:
            raise ValueError("not today")
        return x * 1.5


def test_a_step_after_a_failed_one_is_right_again() -> None:
    model = fixed(nn.Sequential(Block(), nn.Sequential(Block(), Failing()), nn.Sequential(Block(), Failing()), Block()))
    plan = quick_plan(model, (X,), ranks=2, microbatches=3, schedule="1f1b")
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, local=True)
    pipe.step(X, target=TARGET)
    model[2][1].fails = True
    with pytest.raises(penstock.RunError, match=r"ValueError: not today \(.*stage: 1, microbatch: 0, action: 1F0"):
        pipe.step(X, target=TARGET)
    model[2][1].fails = False
    model.zero_grad()
    loss = pipe.step(X, target=TARGET).loss
    found = numbers(model, [loss])
    model.zero_grad()
    expected = numbers(model, [loop(model, mse_loss, 3)(X, TARGET)])
    assert_equal(without_counts(found), without_counts(expected))


def without_counts(found: Numbers) -> Numbers:
    """Blocks also count the samples of a step that fails later."""
    return {name: value for name, value in found.items() if not name.endswith("seen")}


class Scaled(nn.Module):
    """Two layers, and between them a product that is left out without a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """The product is by the scale."""
        x = self.first(x)
        return self.second(x if scale is None else x * scale)


def test_a_batch_that_leaves_a_stage_nothing_to_do_is_refused_in_words() -> None:
    model, scale = fixed(Scaled()), noise(WIDTH)
    stages = penstock.Partition((("first",), ("/mul",), ("second",)))
    plan = quick_plan(model, (X, scale), ranks=3, microbatches=2, schedule="1f1b", partitioner=stages)
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, local=True)
    text = r"nothing to run for this batch \(stage: 1, planned: /mul\)\ntry: plan with a"
    with pytest.raises(penstock.PartitionError, match=text):
        pipe.step(X, target=TARGET)
    pipe.step(X, scale, target=TARGET)
