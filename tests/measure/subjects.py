"""Subjects: small models as what is measured."""

from typing import Any

import torch
from torch import Tensor, nn

from penstock.api.measuring import measured_model
from penstock.capture import capture
from penstock.measure import MeasuredModel

WIDTH, ROWS = 8, 4


class Block(nn.Module):
    """A linear layer and what follows it, with its number among its like."""

    def __init__(self, number: int = 0, slope: float = 0.1) -> None:
        super().__init__()
        self.layer_idx, self.slope = number, slope
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return x + nn.functional.leaky_relu(self.linear(x), self.slope)


def chain(*blocks: nn.Module) -> nn.Sequential:
    """Blocks one after the other; three of them if none is given."""
    return nn.Sequential(*(blocks or (Block(number) for number in range(3))))


def batch() -> Tensor:
    """Numbers for a chain."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))


def measured(model: nn.Module, *args: Any, **kwargs: Any) -> MeasuredModel:
    """A model on a batch; a chain has one if none is given."""
    return measured_model(capture(model, args or (() if kwargs else (batch(),)), kwargs))
