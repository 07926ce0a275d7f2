"""Result: what a step or an evaluation brings home, the same on every rank."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.ir import Trace


@dataclass(frozen=True)
class Result:
    """The loss of the whole batch, that of each microbatch, and what else was asked for."""

    loss: Tensor | None
    losses: tuple[Tensor, ...]
    weights: tuple[float, ...] = ()
    """the factor of each microbatch's loss in that of the batch"""
    outputs: Any = None
    trace: Trace | None = None
    skipped: str = ""
    """why the gradients of this step were dropped; empty if they were not"""
