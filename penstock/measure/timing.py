"""Timing: one node alone, or the unsplit model, run and timed again and again."""

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.measure.subject import Run, Subject
from penstock.measure.times import Times
from penstock.measure.walk import Situation

_SAMPLE_SECONDS, _MOST_REPEATED = 0.005, 32
"""what takes less than so long is run several times in a row: looking at the clock would disturb it"""
Ready = Callable[[bool], Callable[[], Run]]
Gradients = Callable[[dict[str, Any]], dict[str, Tensor]]


class Stopwatch(Protocol):
    """Tells the seconds of a call."""

    def seconds(self, call: Callable[[], Any]) -> tuple[float, Any]: ...


class Timing:
    """A node, or nothing, that is timed; the first run, which warms up, tells how often it runs in a row."""

    def __init__(self, ready: Ready, gradients: Gradients, clock: Stopwatch) -> None:
        self._ready, self._gradients, self._clock = ready, gradients, clock
        first = self.once(1)
        self._times = min(max(math.ceil(_SAMPLE_SECONDS / max(first.step, 1e-9)), 1), _MOST_REPEATED)
        self._samples: list[Times] = []

    @classmethod
    def of_node(cls, situation: Situation, clock: Stopwatch) -> "Timing":
        """That of a node on the values that it reads."""
        return cls(situation.ready, situation.gradients, clock)

    @classmethod
    def of_nothing(cls, subject: Subject, clock: Stopwatch) -> "Timing":
        """That of running by itself."""
        like = next(iter(subject.model.parameters()), torch.zeros(0))
        values = {"x": torch.ones(1, device=like.device, requires_grad=True)}
        return cls(lambda is_split: subject.idle(values, is_split), _ones, clock)

    def sample(self) -> None:
        """Take the time once more."""
        self._samples.append(self.once(self._times))

    @property
    def typical(self) -> Times:
        """The typical of what was sampled."""
        return Times.typical(self._samples)

    def once(self, times: int) -> Times:
        """So many forwards with full backwards, and as many with split ones; the seconds of one of each."""
        waiting = [self._ready(False) for _ in range(times)]
        forward, runs = self._clock.seconds(lambda: [start() for start in waiting])
        given = [self._gradients(run.take_outputs()) for run in runs]
        if not any(given) and not any(run.adds_loss for run in runs):
            return Times(forward / times)
        backward, _ = self._clock.seconds(lambda: [run.backward(g) for run, g in zip(runs, given, strict=True)])
        runs = [self._ready(True)() for _ in range(times)]
        given = [self._gradients(run.take_outputs()) for run in runs]
        input_grad, _ = self._clock.seconds(lambda: [run.input_grad(g) for run, g in zip(runs, given, strict=True)])
        weight_grad, _ = self._clock.seconds(lambda: [run.weight_grad() for run in runs])
        return Times(forward / times, backward / times, input_grad / times, weight_grad / times)


def time_whole(subject: Subject, clock: Stopwatch) -> Times:
    """One forward and backward of the unsplit model."""
    forward, roots = clock.seconds(subject.whole())
    given = [torch.ones_like(root, requires_grad=False) for root in roots]
    backward, _ = clock.seconds(lambda: torch.autograd.backward(roots, given) if roots else None)
    return Times(forward, backward)


def _ones(left: dict[str, Any]) -> dict[str, Tensor]:
    return {name: torch.ones_like(value, requires_grad=False) for name, value in left.items()}
