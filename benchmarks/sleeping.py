"""Stages whose passes sleep instead of computing, so that many ranks overlap on few cores."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from penstock.ir import StageCosts

SIZE = 4
_scale = 1.0
"""factor of all sleeps of this process"""


@contextmanager
def without_sleep() -> Iterator[None]:
    """Let passes return at once, to warm up."""
    global _scale
    _scale = 0.0
    try:
        yield
    finally:
        _scale = 1.0


_ANCHOR = torch.zeros(0, requires_grad=True)
"""makes gradients come by also where the input needs none"""


class _Sleep(Function):
    """Passes values on after a while, and gradients after another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(_scale * forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        time.sleep(_scale * ctx.seconds)
        return gradient, None, None, None


def sleep(x: Tensor, forward: float, backward: float) -> Tensor:
    """The same values, after `forward` seconds; its gradient takes `backward` seconds."""
    slept: Tensor = _Sleep.apply(x, _ANCHOR, forward, backward)  # type: ignore[no-untyped-call]
    return slept


class SleepingBlock(nn.Module):
    """A small layer: forward, the gradient of its input and the gradient of its weight sleep `unit` seconds each."""

    def __init__(self, unit: float) -> None:
        super().__init__()
        self.unit = unit
        self.layer = nn.Linear(SIZE, SIZE, bias=False)
        self.layer.weight.register_hook(self._sleep)

    def forward(self, x: Tensor) -> Tensor:
        """The layer on what has slept."""
        made: Tensor = self.layer(sleep(x, self.unit, self.unit))
        return made

    def _sleep(self, gradient: Tensor) -> None:
        time.sleep(_scale * self.unit)


class PacedBlock(nn.Module):
    """A layer with many parameters whose forward takes `unit` seconds and whose backward takes two of them."""

    def __init__(self, unit: float, num_parameters: int) -> None:
        super().__init__()
        self.unit = unit
        self.weight = nn.Parameter(torch.zeros(num_parameters))

    def forward(self, x: Tensor) -> Tensor:
        """The input plus the first weights."""
        began: list[float] = []
        slept: Tensor = _Paced.apply(x, _ANCHOR, self.unit, began)  # type: ignore[no-untyped-call]
        made = slept + self.weight[:SIZE]
        if made.requires_grad:
            made.register_hook(lambda _: began.append(time.perf_counter()))
        return made


class _Paced(Function):
    """The first operation of a PacedBlock: its backward runs last and sleeps for the rest of the block's time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _: Tensor, unit: float, began: list[float]) -> Tensor:
        ctx.unit, ctx.began = unit, began
        time.sleep(unit)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        time.sleep(max(0.0, ctx.began[0] + 2 * ctx.unit - time.perf_counter()))
        return gradient, None, None, None


def costs(num_stages: int, unit: float) -> StageCosts:
    """What the passes take: without an input that needs a gradient, the first stage does all in its weight gradient."""
    others = (unit,) * (num_stages - 1)
    return StageCosts((unit,) * num_stages, (0.0, *others), (2 * unit, *others))
