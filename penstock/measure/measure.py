"""measure: every node alone, timed on its device, and calibrated to the unsplit model."""

import gc
import math
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.ir import Node, Profile
from penstock.measure.clock import OUTLIERS, Clock, uncollected
from penstock.measure.device import device_name, home_of
from penstock.measure.findings import Findings, versions
from penstock.measure.kinship import families, told_of
from penstock.measure.memory import Memory, memory_of
from penstock.measure.subject import Subject, Tell, silent
from penstock.measure.times import Times
from penstock.measure.timing import Timing, time_whole
from penstock.measure.walk import Situation, walk

_SAMPLED = 3
"""of a family of equal nodes at most so many are timed: the first, the last, and one between"""
_FEWEST_TURNS = 3
_ALIKE, _LITTLE_SECONDS = 1.3, 5e-5
"""how far the slowest may be from the fastest, as a ratio or in all; if they are further apart, all are timed"""


def measure(subject: Subject, iterations: int, budget_seconds: float = math.inf, tell: Tell = silent) -> Profile:
    """The profile of a model on the device where it is. The model is left as it was.

    When the budget is used up, no further turn begins; a few are taken in any case.
    """
    device = home_of(subject.model)
    end = time.monotonic() + budget_seconds
    with subject.undisturbed(), uncollected():
        found, whole, factors = _Round(subject, Clock(device), _Turns(iterations, end, tell)).findings()
    calibration = "forward x{:.3f}, backward x{:.3f}".format(*factors)
    return found.profile(whole.step, device_name(device), (*versions(), ("calibrated", calibration)))


@dataclass(frozen=True)
class _Turns:
    """How often everything is timed."""

    iterations: int
    end: float
    """on the clock, after which no further turn begins"""
    tell: Tell

    def __iter__(self) -> Iterator[int]:
        total = self.iterations + OUTLIERS
        for number in range(total):
            if number >= _FEWEST_TURNS and time.monotonic() > self.end:
                return
            yield number
            # Only what is new is looked through: the rest was there before.
            gc.collect(0)
            self.tell(number + 1, total)


class _Round:
    """One measurement of a model."""

    def __init__(self, subject: Subject, clock: Clock, turns: _Turns) -> None:
        self._subject, self._clock, self._turns = subject, clock, turns
        self._families = families(subject)
        self._times: dict[str, Times] = {}
        self._memory: dict[str, Memory] = {}
        self._wholes: list[Times] = []

    def findings(self) -> tuple[Findings, Times, tuple[float, float]]:
        """What was found out about the nodes, the times of the whole, and what those of the nodes are scaled by."""
        sizes = self._look(node.name for family in self._families for node in _sampled(family))
        unlike = [node.name for family in self._families if not self._are_alike(family) for node in family]
        if others := set(unlike) - self._times.keys():
            self._look(others)
        whole, times = Times.typical(self._wholes), self._shared()
        factors = calibration(times.values(), whole)
        scaled = {name: each.scaled(*factors) for name, each in times.items()}
        return Findings(self._subject.graph, scaled, self._all_memory(), sizes), whole, factors

    def _look(self, names: Iterable[str]) -> dict[str, int]:
        """Time some nodes, and look at the memory of the first of every family."""
        chosen, firsts = set(names), {family[0].name for family in self._families}
        timings: dict[str, Timing] = {}

        def visit(situation: Situation) -> None:
            name = situation.node.name
            if name in chosen:
                timings[name] = Timing.of_node(situation, self._clock)
                if name in firsts:
                    self._memory[name] = memory_of(situation)

        sizes = walk(self._subject, visit)
        self._sample(timings)
        return sizes

    def _sample(self, timings: Mapping[str, Timing]) -> None:
        """By turns with the unsplit model, so that a machine that slows down slows all alike."""
        idle = Timing.of_nothing(self._subject, self._clock)
        for _ in self._turns:
            # The first one finds the memory given back that nodes do not need, as no step after a step does.
            time_whole(self._subject, self._clock)
            self._wholes.append(time_whole(self._subject, self._clock))
            for timing in (idle, *timings.values()):
                timing.sample()
        self._times |= {name: timing.typical.without(idle.typical) for name, timing in timings.items()}

    def _are_alike(self, family: Sequence[Node]) -> bool:
        steps = [self._times[node.name].step for node in _sampled(family) if node.name in self._times]
        return not steps or max(steps) <= max(_ALIKE * min(steps), min(steps) + _LITTLE_SECONDS)

    def _shared(self) -> dict[str, Times]:
        """The times of every node; of those that are alike, the typical ones."""
        found: dict[str, Times] = {}
        for family in self._families:
            known = {node.name: self._times[node.name] for node in family if node.name in self._times}
            if known and self._are_alike(family):
                found |= dict.fromkeys((node.name for node in family), Times.median(known.values()))
            else:
                found |= known
        return found

    def _all_memory(self) -> dict[str, Memory]:
        known = [(self._memory[family[0].name], family) for family in self._families if family[0].name in self._memory]
        return {node.name: told_of(memory, family[0], node) for memory, family in known for node in family}


def calibration(times: Collection[Times], whole: Times) -> tuple[float, float]:
    """What forwards and backwards are to be scaled by so that all nodes together take as long as the whole."""
    forward, backward = sum(each.forward for each in times), sum(each.backward for each in times)
    return whole.forward / forward if forward else 1.0, whole.backward / backward if backward else 1.0


def _sampled(family: Sequence[Node]) -> list[Node]:
    if len(family) <= _SAMPLED:
        return list(family)
    return [family[0], family[len(family) // 2], family[-1]]
