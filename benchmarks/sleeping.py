"""Modules whose passes sleep instead of computing, so that more ranks than cores run in parallel."""

import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from benchmarks.table import Line
from penstock.errors import PenstockWarning
from penstock.ir import StageCosts

# The hooks of SleepingBlock leave gradients as they are, so it does not matter how often they are called.
warnings.filterwarnings("ignore", "hooks on parameters", PenstockWarning)

SIZE = 4
_scale = 1.0
"""factor of the duration of all sleeps in this process"""


@contextmanager
def without_sleep() -> Iterator[None]:
    """Makes passes return without sleeping, for warmup steps."""
    global _scale
    _scale = 0.0
    try:
        yield
    finally:
        _scale = 1.0


_BUSY_LOOP = "import os; os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\nwhile True: pass"


def with_awake_cores(lines: Iterable[Line]) -> Iterator[Line]:
    """Measures the lines of a table while the cores of this machine are kept from halting.

    A halted core of a virtual machine takes 0.1 ms to several ms to wake up, which is then part of every pass and of
    every message, whichever runtime is measured. A busy process per core prevents that. Its priority is SCHED_IDLE: it
    runs only while its core has nothing else to do. Do not use it for passes that compute: if two cores are
    hyperthreads of one, a busy loop on one of them slows down the other.
    """
    num_loops = len(os.sched_getaffinity(0)) if hasattr(os, "SCHED_IDLE") else 0
    loops = [subprocess.Popen([sys.executable, "-c", _BUSY_LOOP]) for _ in range(num_loops)]
    try:
        yield from lines
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


_ANCHOR = torch.zeros(0, requires_grad=True)
"""an input that requires grad, so that backward also runs where the first input does not"""


class _Sleep(Function):
    """The identity; forward and backward sleep."""

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
    """Returns a copy of x after `forward` seconds; its backward takes `backward` seconds."""
    slept: Tensor = _Sleep.apply(x, _ANCHOR, forward, backward)  # type: ignore[no-untyped-call]
    return slept


class SleepingBlock(nn.Module):
    """A small linear layer whose forward, input gradient and weight gradient sleep `unit` seconds each."""

    def __init__(self, unit: float) -> None:
        super().__init__()
        self.unit = unit
        self.layer = nn.Linear(SIZE, SIZE, bias=False)
        self.layer.weight.register_hook(self._sleep)

    def forward(self, x: Tensor) -> Tensor:
        """Sleeps, then applies the layer."""
        output: Tensor = self.layer(sleep(x, self.unit, self.unit))
        return output

    def _sleep(self, gradient: Tensor) -> None:
        time.sleep(_scale * self.unit)


class PacedBlock(nn.Module):
    """A layer with many parameters whose forward takes `unit` seconds and whose backward takes twice as long.

    Unlike in a SleepingBlock, the time to compute the gradient of the parameters is a part of that of the backward.
    """

    def __init__(self, unit: float, num_parameters: int) -> None:
        super().__init__()
        self.unit = unit
        self.weight = nn.Parameter(torch.zeros(num_parameters))

    def forward(self, x: Tensor) -> Tensor:
        """Adds the first weights to the input."""
        backward_start: list[float] = []
        slept: Tensor = _Paced.apply(x, _ANCHOR, self.unit, backward_start)  # type: ignore[no-untyped-call]
        output = slept + self.weight[:SIZE]
        if output.requires_grad:
            output.register_hook(lambda _: backward_start.append(time.perf_counter()))
        return output


class _Paced(Function):
    """The first operation of a PacedBlock. Its backward runs last and sleeps for the remaining time of the block."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _: Tensor, unit: float, backward_start: list[float]) -> Tensor:
        ctx.unit, ctx.backward_start = unit, backward_start
        time.sleep(unit)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        time.sleep(max(0.0, ctx.backward_start[0] + 2 * ctx.unit - time.perf_counter()))
        return gradient, None, None, None


def costs(num_stages: int, unit: float) -> StageCosts:
    """Costs of stages of one SleepingBlock; the first has no input gradient, and its weight gradient sleeps twice."""
    others = (unit,) * (num_stages - 1)
    return StageCosts((unit,) * num_stages, (0.0, *others), (2 * unit, *others))
