"""backward: the cost of splitting backward into input and weight gradients, beside torch on the same modules."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from benchmarks.table import Line, Table
from penstock.capture import capture
from penstock.partitioners import by_modules
from penstock.stages import StageRun, split

_ROWS = 64
_SIZES = ((32, 4, 1.2), (32, 16, 1.2), (256, 4, 1.05), (256, 16, 1.05), (512, 4, 1.05), (512, 16, 1.05))
"""width, layers, and how much of a whole backward the two parts may take"""


def tables() -> tuple[Table, ...]:
    """Everything that `make bench` shows about the split backward."""
    return (parts(), growth())


class Side:
    """A stage of some layers, its whole backward and its two parts: ours through runs, torch's on the modules."""

    def __init__(self, layers: int, width: int, activation: type[nn.Module] = nn.ReLU) -> None:
        blocks = [nn.Sequential(nn.Linear(width, width), activation()) for _ in range(layers)]
        model, batch = nn.Sequential(nn.Tanh(), *blocks), torch.randn(_ROWS, width, requires_grad=True)
        captured = capture(model, (batch,))
        names = [[str(place) for place in group] for group in ([0], range(1, layers + 1))]
        self.stage = split(captured, by_modules(captured.graph, names))[1]
        self.recording, self.blocks = captured.first, nn.Sequential(*blocks)
        self.name, self.batch = captured.graph.nodes[0].makes[0].name, batch
        self.gradient = torch.randn(_ROWS, width)

    def run(self, is_split: bool) -> tuple[StageRun, dict[str, Tensor | None]]:
        """One forward, and the gradient that comes back."""
        run = StageRun(self.stage, self.recording, {}, {self.name: self.batch}, is_split)
        return run, dict.fromkeys(run.take_outputs(), self.gradient)

    def whole(self) -> float:
        """Seconds of a backward in one."""
        run, gradients = self.run(is_split=False)
        return _seconds(lambda: run.backward(gradients))

    def ours(self) -> tuple[float, float]:
        """Seconds of input gradients, and of weight gradients."""
        run, gradients = self.run(is_split=True)
        return _seconds(lambda: run.input_grad(gradients)), _seconds(run.weight_grad)

    def torchs(self) -> tuple[float, float]:
        """The same by torch."""
        entered = self.batch.detach().requires_grad_()
        outputs, found = [self.blocks(entered)], []
        weights = self.blocks.parameters

        def inputs() -> None:
            found.extend(stage_backward_input(outputs, [self.gradient], [entered], weights())[1])

        return _seconds(inputs), _seconds(lambda: stage_backward_weight(weights(), found))


def parts(sizes: Sequence[tuple[int, int, float]] = _SIZES, seconds: float = 4.0) -> Table:
    """(I + W) / B of both, the least of many repetitions of each, in turn."""

    def lines() -> Iterator[Line]:
        for width, layers, target in sizes:
            side = Side(layers, width)
            whole, *figures = _least(seconds, side.whole, side.ours, side.torchs)
            ours, theirs = (sum(figure) / whole[0] for figure in figures)
            times = [f"{1e6 * each:.0f}" for each in (*whole, *figures[0], *figures[1])]
            yield Line((f"{layers} x {width}", *times, f"{ours:.3f}", f"{theirs:.2f}"), ours, target, at_least=False)

    columns = ("layers x width", "B", "I", "W", "torch's I", "torch's W", "ours/B", "torch's/B")
    return Table(f"split backward of linear + ReLU, {_ROWS} rows, microseconds", columns, lines())


def growth(layers: Sequence[int] = (4, 8, 16, 32), width: int = 32, seconds: float = 1.0) -> Table:
    """Seconds of the weight gradients against the number of layers, and the exponent that fits them best."""

    def lines() -> Iterator[Line]:
        sides = [Side(each, width) for each in layers]
        ways: dict[str, Callable[[Side], Callable[[], Any]]] = {
            "ours": lambda side: side.ours,
            "torch's": lambda side: side.torchs,
        }
        for name, way in ways.items():
            figures = [_least(seconds, way(side))[0][1] for side in sides]
            exponent = float(np.polyfit(np.log(layers), np.log(figures), 1)[0])
            limit = 1.1 if name == "ours" else math.inf
            cells = (name, *(f"{1e6 * each:.0f}" for each in figures), f"{exponent:.2f}")
            yield Line(cells, exponent, limit, at_least=False)

    columns = ("W", *(f"{each} layers" for each in layers), "exponent")
    return Table(f"weight gradients, microseconds, width {width}: growth with the layers", columns, lines())


def _least(seconds: float, *calls: Callable[[], Any]) -> list[tuple[float, ...]]:
    """The least figures of each call, all called in turn for so long and at least seven times."""
    found: list[list[tuple[float, ...]]] = [[] for _ in calls]
    end = time.perf_counter() + seconds
    while len(found[0]) < 7 or time.perf_counter() < end:
        for call, figures in zip(calls, found, strict=True):
            figure = call()
            figures.append(figure if isinstance(figure, tuple) else (figure,))
    return [tuple(map(min, zip(*figures, strict=True))) for figures in found]


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
