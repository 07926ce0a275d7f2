"""What a user changes in a model between two steps holds from the next step on, on every rank."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock
from tests.parity import PIPELINES, Execution, Values, WholeModel, accumulate, assert_close, copied, split, values
from tests.plans import quick_plan
from tests.small_models import WIDTH, Block, noise, seeded

X, TARGET = noise(6, WIDTH), noise(6, WIDTH, seed=1)
SCHEDULES = ("1f1b", "zb_h1", "zbv")


def normalised() -> nn.Module:
    """Blocks with batch norm and dropout."""
    parts = (nn.Sequential(Block(), nn.BatchNorm1d(WIDTH), nn.Dropout(0.0)) for _ in range(4))
    return seeded(nn.Sequential(*parts))


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


def changed(trained: Any, model: nn.Module) -> list[Values]:
    """The values after a step that follows each change."""
    found = []
    for change in CHANGES:
        change(model)
        for parameter in model.parameters():
            parameter.grad = None
        found.append(copied(accumulate(trained, X, target=TARGET)))
    return found


def changed_pipeline(schedule: str, execution: str) -> list[Values]:
    model = normalised()
    plan = quick_plan(model, (X,), ranks=2, microbatches=2, schedule=schedule)
    return changed(split(execution, model, plan, mse_loss), model)


def changed_whole_model() -> list[Values]:
    model = normalised()
    return changed(WholeModel(model, mse_loss, microbatches=2), model)


@pytest.mark.filterwarnings("ignore:batch norm")
@pytest.mark.parametrize("execution", PIPELINES, indirect=True)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_next_step_follows_a_change_of_the_model(execution: Execution, schedule: str) -> None:
    for found, expected in zip(execution.run(changed_pipeline, 2, schedule), changed_whole_model(), strict=True):
        assert_close(found, expected)


class Failing(nn.Module):
    """Fails while `fails` is set."""

    fails = False

    def forward(self, x: Any) -> Any:
        """1.5 times the input."""
        if self.fails:
            raise ValueError("not today")
        return x * 1.5


def test_a_step_after_a_failed_one_is_correct() -> None:
    model = seeded(
        nn.Sequential(Block(), nn.Sequential(Block(), Failing()), nn.Sequential(Block(), Failing()), Block())
    )
    plan = quick_plan(model, (X,), ranks=2, microbatches=3, schedule="1f1b")
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, local=True)
    pipe.step(X, target=TARGET)
    model[2][1].fails = True
    with pytest.raises(penstock.RunError, match=r"ValueError: not today \(.*stage: 1, microbatch: 0, action: 1F0"):
        pipe.step(X, target=TARGET)
    model[2][1].fails = False
    model.zero_grad()
    loss = pipe.step(X, target=TARGET).loss
    found = values(model, [loss])
    model.zero_grad()
    expected = values(model, [WholeModel(model, mse_loss, microbatches=3).step(X, target=TARGET).loss])
    assert_close(without_counts(found), without_counts(expected))


def without_counts(found: Values) -> Values:
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


def test_a_batch_may_leave_a_stage_empty() -> None:
    model, scale = seeded(Scaled()), noise(WIDTH)
    stages = penstock.Partition((("first",), ("/mul",), ("second",)))
    plan = quick_plan(model, (X, scale), ranks=3, microbatches=2, schedule="1f1b", partitioner=stages)
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, local=True)
    for arguments in ((X,), (X, scale)):
        result = pipe.step(*arguments, target=TARGET)
        torch.testing.assert_close(result.loss, mse_loss(model(*arguments), TARGET).detach())
