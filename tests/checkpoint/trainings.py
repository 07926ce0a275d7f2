"""Trainings that stop and go on: a small tied model, its batches by the number of the step, and what a rank does."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import penstock
from penstock.ir import Plan
from tests.plans import quick_plan
from tests.small_models import tied, token_loss, tokens

IDS = tokens(8, 3)
OPTIMIZERS = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.02),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
}


def the_plan(ranks: int, schedule: str = "1f1b", **choices: Any) -> Plan:
    """A plan of the tied model with two microbatches."""
    return quick_plan(tied(), (IDS,), ranks=ranks, microbatches=2, schedule=schedule, loss_fn=token_loss, **choices)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The batch of a step, the same for every caller."""
    return tokens(8, 3, seed=2 * step), tokens(8, 3, seed=2 * step + 1)


class Training:
    """A pipeline and its optimizer."""

    def __init__(
        self, plan: Plan, optimizer: str = "adam", local: bool = False, model: nn.Module | None = None
    ) -> None:
        self.pipe = penstock.Pipeline(model or tied(), plan, loss_fn=token_loss, local=local)
        self.optimizer = OPTIMIZERS[optimizer](self.pipe.parameters())

    def losses(self, steps: int, clip: float = 0.5) -> list[float]:
        """The losses of the next steps."""
        found = []
        for _ in range(steps):
            self.optimizer.zero_grad()
            ids, labels = batch(self.pipe.num_steps)
            found.append(float(self.pipe.step(ids, target=labels).loss))
            self.pipe.clip_grad_norm_(clip)
            self.optimizer.step()
        return found

    def save(self, root: str | Path, **options: Any) -> Path:
        """Save with the optimizer."""
        return self.pipe.save(root, self.optimizer, **options)


def saved(root: Path, *steps: int, ranks: int = 2) -> Training:
    """Save checkpoints of some steps of a local training."""
    training = Training(the_plan(ranks), local=True)
    for step in steps:
        training.losses(step - training.pipe.num_steps)
        training.save(root)
    return training


def numbers(training: Training) -> list[Tensor]:
    """All parameters and optimizer state."""
    found = [parameter.detach().clone() for parameter in training.pipe.parameters()]
    states = training.optimizer.state.values()
    return found + [value.clone() for state in states for value in state.values() if isinstance(value, Tensor)]
