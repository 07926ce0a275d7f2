"""backward: seconds of a backward split into input and weight gradients, compared with a full one and with torch's."""

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
"""width, layers, and the maximum of both parts together divided by a full backward"""


def tables() -> tuple[Table, ...]:
    """All tables of this benchmark."""
    return (parts(), growth())


class Backwards:
    """Times the backwards of one stage: full, split by penstock, and split by torch on the same modules."""

    def __init__(self, layers: int, width: int, activation: type[nn.Module] = nn.ReLU) -> None:
        blocks = [nn.Sequential(nn.Linear(width, width), activation()) for _ in range(layers)]
        model, batch = nn.Sequential(nn.Tanh(), *blocks), torch.randn(_ROWS, width, requires_grad=True)
        captured = capture(model, (batch,))
        names = [[str(place) for place in group] for group in ([0], range(1, layers + 1))]
        self.stage = split(captured, by_modules(captured.graph, names))[1]
        self.recording, self.blocks = captured.example_recording, nn.Sequential(*blocks)
        self.name, self.batch = captured.graph.nodes[0].makes[0].name, batch
        self.gradient = torch.randn(_ROWS, width)

    def run(self, is_split: bool) -> tuple[StageRun, dict[str, Tensor | None]]:
        """Runs a forward; returns it with the gradients of its outputs."""
        run = StageRun(self.stage, self.recording, {}, {self.name: self.batch}, is_split)
        return run, dict.fromkeys(run.take_outputs(), self.gradient)

    def full(self) -> float:
        """Seconds of a full backward."""
        run, gradients = self.run(is_split=False)
        return _seconds(lambda: run.backward(gradients))

    def penstock_split(self) -> tuple[float, float]:
        """Seconds of the input gradients and of the weight gradients."""
        run, gradients = self.run(is_split=True)
        return _seconds(lambda: run.input_grad(gradients)), _seconds(run.weight_grad)

    def torch_split(self) -> tuple[float, float]:
        """The same by the functions of torch.distributed.pipelining."""
        x = self.batch.detach().requires_grad_()
        outputs, groups = [self.blocks(x)], []
        weights = self.blocks.parameters

        def inputs() -> None:
            groups.extend(stage_backward_input(outputs, [self.gradient], [x], weights())[1])

        return _seconds(inputs), _seconds(lambda: stage_backward_weight(weights(), groups))


def parts(sizes: Sequence[tuple[int, int, float]] = _SIZES, seconds: float = 4.0) -> Table:
    """Minimum seconds of full backward (B), input gradient (I) and weight gradient (W), and (I + W) / B."""

    def lines() -> Iterator[Line]:
        for width, layers, target in sizes:
            stage = Backwards(layers, width)
            full, ours, theirs = _minima(seconds, stage.full, stage.penstock_split, stage.torch_split)
            times = [f"{1e6 * each:.0f}" for each in (*full, *ours, *theirs)]
            ratios = sum(ours) / full[0], sum(theirs) / full[0]
            cells = (f"{layers} x {width}", *times, f"{ratios[0]:.3f}", f"{ratios[1]:.2f}")
            yield Line(cells, ratios[0], target, at_least=False)

    columns = ("layers x width", "B", "I", "W", "torch's I", "torch's W", "ours/B", "torch's/B")
    return Table(f"split backward of linear + ReLU, {_ROWS} rows, microseconds", columns, lines())


def growth(layers: Sequence[int] = (4, 8, 16, 32), width: int = 32, seconds: float = 1.0) -> Table:
    """Seconds of the weight gradients by number of layers, and the exponent of a power-law fit."""

    def lines() -> Iterator[Line]:
        stages = [Backwards(count, width) for count in layers]
        calls = {
            "penstock": [stage.penstock_split for stage in stages],
            "torch": [stage.torch_split for stage in stages],
        }
        for name, splits in calls.items():
            weight_grads = [_minima(seconds, split)[0][1] for split in splits]
            exponent = float(np.polyfit(np.log(layers), np.log(weight_grads), 1)[0])
            target = 1.1 if name == "penstock" else math.inf
            cells = (name, *(f"{1e6 * each:.0f}" for each in weight_grads), f"{exponent:.2f}")
            yield Line(cells, exponent, target, at_least=False)

    columns = ("W", *(f"{each} layers" for each in layers), "exponent")
    return Table(f"weight gradients by number of layers, width {width}, microseconds", columns, lines())


def _minima(seconds: float, *calls: Callable[[], Any]) -> list[tuple[float, ...]]:
    """Runs the calls interleaved for some seconds, each at least seven times; returns the minimum of every result."""
    results: list[list[tuple[float, ...]]] = [[] for _ in calls]
    end = time.perf_counter() + seconds
    while len(results[0]) < 7 or time.perf_counter() < end:
        for call, own in zip(calls, results, strict=True):
            result = call()
            own.append(result if isinstance(result, tuple) else (result,))
    return [tuple(map(min, zip(*own, strict=True))) for own in results]


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
