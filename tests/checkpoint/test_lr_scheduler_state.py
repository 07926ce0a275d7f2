"""Schedulers resume with another plan at the learning rates they would have had, or are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.lr_scheduler import LRScheduler

import penstock
from penstock.errors import CheckpointError
from penstock.ir import Plan
from tests.plans import BATCHES, quick_plan
from tests.small_models import chain


def plan_for(ranks: int) -> Plan:
    return quick_plan(
        chain(6), BATCHES[0][:1], ranks=ranks, microbatches=2, schedule="gpipe", loss_fn=nn.functional.mse_loss
    )


PLANS = {ranks: plan_for(ranks) for ranks in (1, 2)}
Make = Callable[[torch.optim.Optimizer], Any]


def shifted(optimizer: torch.optim.Optimizer) -> LRScheduler:
    """A scheduler whose base learning rates were changed."""
    made = schedulers.LambdaLR(optimizer, lambda step: 0.5**step)
    made.base_lrs = [0.3, 0.2]
    return made


def sequence(*makes: Make) -> Make:
    return lambda optimizer: schedulers.SequentialLR(optimizer, [make(optimizer) for make in makes], [2])


def linear(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return schedulers.LinearLR(optimizer, 0.1, total_iters=2)


def cyclic(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return schedulers.CyclicLR(optimizer, 0.001, 0.1, step_size_up=3, cycle_momentum=False)


def one_cycle(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return schedulers.OneCycleLR(optimizer, 0.1, total_steps=20, cycle_momentum=False)


MAKES: dict[str, Make] = {
    "lambda": lambda optimizer: schedulers.LambdaLR(optimizer, lambda step: 0.5**step),
    "steps": lambda optimizer: schedulers.MultiStepLR(optimizer, [1, 4]),
    "cosine": lambda optimizer: schedulers.CosineAnnealingWarmRestarts(optimizer, 3),
    "cyclic": cyclic,
    "one cycle": one_cycle,
    "chained": lambda optimizer: schedulers.ChainedScheduler(
        [linear(optimizer), schedulers.ExponentialLR(optimizer, 0.9)]
    ),
    "linear, then cyclic": sequence(linear, cyclic),
    "linear, then one cycle": sequence(linear, one_cycle),
    "shifted": shifted,
}


class Rated:
    """A local pipeline whose optimizer has several groups, each with its own learning rate."""

    def __init__(self, ranks: int, make: Make, groups: int = 2, is_reversed: bool = False) -> None:
        self.pipe = penstock.Pipeline(chain(6), PLANS[ranks], loss_fn=nn.functional.mse_loss, local=True)
        own = list(self.pipe.parameters())
        parts = [{"params": own[place::groups], "lr": 0.1 / (1 + place)} for place in range(groups)]
        self.optimizer = torch.optim.SGD(parts[::-1] if is_reversed else parts)
        self.scheduler = make(self.optimizer)

    def rates(self, steps: int) -> list[list[float]]:
        """The learning rates after each of the next steps."""
        found = []
        for _ in range(steps):
            self.optimizer.step()
            self.scheduler.step()
            found.append([group["lr"] for group in self.optimizer.param_groups])
        return found

    def save(self, root: Path) -> None:
        self.pipe.save(root, self.optimizer, scheduler=self.scheduler)

    def load(self, root: Path) -> "Rated":
        self.pipe.load(root, self.optimizer, scheduler=self.scheduler)
        return self


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MAKES)
def test_another_plan_resumes_with_the_same_rates(name: str, tmp_path: Path) -> None:
    whole, first = Rated(2, MAKES[name]), Rated(2, MAKES[name])
    expected = whole.rates(8)
    assert first.rates(3) == expected[:3]
    first.save(tmp_path)
    assert Rated(1, MAKES[name]).load(tmp_path).rates(5) == expected[3:]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["lambda", "steps", "chained"])
def test_groups_in_another_order_resume_with_their_own_rates(name: str, tmp_path: Path) -> None:
    whole, first = Rated(2, MAKES[name]), Rated(2, MAKES[name])
    expected = whole.rates(8)
    first.rates(3)
    first.save(tmp_path)
    found = Rated(2, MAKES[name], is_reversed=True).load(tmp_path).rates(5)
    assert [rates[::-1] for rates in found] == expected[3:]


@pytest.mark.filterwarnings("ignore")
def test_lists_that_cannot_follow_the_order_of_the_groups_cause_a_warning(tmp_path: Path) -> None:
    first = Rated(2, MAKES["shifted"])
    first.rates(3)
    first.save(tmp_path)
    with pytest.warns(penstock.PenstockWarning, match="groups have another order than in the checkpoint"):
        Rated(2, MAKES["shifted"], is_reversed=True).load(tmp_path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["cyclic", "shifted", "linear, then cyclic"])
def test_a_state_for_other_groups_is_refused_and_changes_nothing(name: str, tmp_path: Path) -> None:
    first = Rated(2, MAKES[name])
    first.rates(3)
    first.save(tmp_path)
    other = Rated(1, MAKES["lambda"] if name == "shifted" else MAKES[name], groups=1)
    other.optimizer.param_groups[0]["lr"] = 0.7
    with pytest.raises(CheckpointError):
        other.load(tmp_path)
    assert other.optimizer.param_groups[0]["lr"] == 0.7
