"""Times one node alone, or the unsplit model, repeatedly."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.measure.clock import Clock, Times
from penstock.measure.measured_model import MeasuredModel, NodeRun, NodeVisit
from penstock.measure.work import WorkCounter

_SAMPLE_SECONDS, _MAX_REPEATS = 0.005, 32
"""shorter runs are repeated several times in a row, as reading the clock would disturb them"""
Prepare = Callable[[bool], Callable[[], NodeRun]]
Gradients = Callable[[dict[str, Any]], dict[str, Tensor]]


class Timing:
    """Repeated timing of a node, or of an empty run; the first run warms up and sets the number of repeats."""

    def __init__(self, prepare: Prepare, gradients: Gradients, clock: Clock | WorkCounter) -> None:
        self._prepare, self._gradients, self._clock = prepare, gradients, clock
        first = self.once(1)
        self._repeats = min(max(math.ceil(_SAMPLE_SECONDS / max(first.step, 1e-9)), 1), _MAX_REPEATS)
        self._samples: list[Times] = []

    @classmethod
    def of_node(cls, visited: NodeVisit, clock: Clock | WorkCounter) -> "Timing":
        """The timing of a node on the values that it reads."""
        return cls(visited.prepare, visited.gradients, clock)

    @classmethod
    def of_nothing(cls, subject: MeasuredModel, clock: Clock | WorkCounter) -> "Timing":
        """The timing of a run without a node, which is the overhead."""
        like = next(iter(subject.model.parameters()), torch.zeros(0))
        values = {"x": torch.ones(1, device=like.device, requires_grad=True)}
        return cls(lambda is_split: subject.prepare_nothing(values, is_split), _ones, clock)

    def sample(self) -> None:
        """Take one more sample."""
        self._samples.append(self.once(self._repeats))

    @property
    def typical(self) -> Times:
        """The typical times of the samples."""
        return Times.typical(self._samples)

    def once(self, times: int) -> Times:
        """Run `times` forwards with full backwards, and as many with split ones; the seconds of one of each."""
        prepared = [self._prepare(False) for _ in range(times)]
        forward, runs = self._clock.seconds(lambda: [run() for run in prepared])
        given = [self._gradients(run.take_outputs()) for run in runs]
        if not any(given) and not any(run.adds_loss for run in runs):
            return Times(forward / times)
        backward, _ = self._clock.seconds(lambda: [run.backward(g) for run, g in zip(runs, given, strict=True)])
        runs = [self._prepare(True)() for _ in range(times)]
        given = [self._gradients(run.take_outputs()) for run in runs]
        input_grad, _ = self._clock.seconds(lambda: [run.input_grad(g) for run, g in zip(runs, given, strict=True)])
        weight_grad, _ = self._clock.seconds(lambda: [run.weight_grad() for run in runs])
        return Times(forward / times, backward / times, input_grad / times, weight_grad / times)


def time_whole(subject: MeasuredModel, clock: Clock | WorkCounter) -> Times:
    """One forward and backward of the unsplit model."""
    forward, roots = clock.seconds(subject.prepare_whole())
    given = [torch.ones_like(root, requires_grad=False) for root in roots]
    backward, _ = clock.seconds(lambda: torch.autograd.backward(roots, given) if roots else None)
    return Times(forward, backward)


def _ones(outputs: dict[str, Any]) -> dict[str, Tensor]:
    return {name: torch.ones_like(value, requires_grad=False) for name, value in outputs.items()}
