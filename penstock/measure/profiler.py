"""Measures or estimates every node of a model alone, and combines the results into a Profile."""

import gc
import math
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from penstock.capture import device_of
from penstock.ir import DeviceSpeed, Graph, Node, NodeBytes, NodeCost, Profile, SavedTensors
from penstock.measure.clock import OUTLIERS, Clock, Times, without_gc
from penstock.measure.device import device_name
from penstock.measure.identity import group_equal_nodes, transfer_memory
from penstock.measure.measured_model import MeasuredModel, NodeVisit, Progress, no_progress, visit_nodes
from penstock.measure.memory import Memory, memory_of
from penstock.measure.timing import Timing, time_whole
from penstock.measure.work import WorkCounter, fused_attention

_MAX_TIMED = 3
"""nodes of a group of equal nodes that are timed: the first, the last, and one between"""
_MIN_ROUNDS = 3
_MAX_RATIO, _MAX_DIFFERENCE_SECONDS = 1.3, 5e-5
"""between the slowest and the fastest node of a group, whichever allows more; beyond that, all nodes are timed"""


def measure(
    subject: MeasuredModel, iterations: int, budget_seconds: float = math.inf, progress: Progress = no_progress
) -> Profile:
    """Measure a model on its device. The model is left as it was.

    Every node is timed `iterations` times. After `budget_seconds` no further round starts, but at least three run.
    """
    device = device_of(subject.model)
    end = time.monotonic() + budget_seconds
    with subject.isolated(), without_gc():
        findings, whole, factors = _Measurement(subject, Clock(device), _Rounds(iterations, end, progress)).findings()
    calibration = "forward x{:.3f}, backward x{:.3f}".format(*factors)
    return findings.profile(whole.step, device_name(device), (*_versions(), ("calibrated", calibration)))


@dataclass(frozen=True)
class _NodeFindings:
    """Seconds and memory of the nodes, except those left out, and the bytes of the storage behind every value."""

    graph: Graph
    times: Mapping[str, Times]
    memory: Mapping[str, Memory]
    sizes: Mapping[str, int]

    def profile(self, step_seconds: float | None, device: str, versions: tuple[tuple[str, str], ...]) -> Profile:
        """Put the profile together; without the seconds of a step, the sum of all nodes is taken."""
        memories = self.memory.values()
        held = {name for memory in memories for name in self._shared(memory.holds.values)}
        late = {name for memory in memories for name in self._shared(memory.holds.late_values)}
        costs = tuple(self._cost(node, held, late) for node in self.graph.nodes)
        total = math.fsum(times.step for times in self.times.values())
        pairs = tuple((name, size) for name, size in self.sizes.items() if self._first(name) == name)
        seconds = total if step_seconds is None else step_seconds
        return Profile(costs, seconds, self.graph.fingerprint, device, versions, pairs)

    def _cost(self, node: Node, held: set[str], late: set[str]) -> NodeCost:
        (holds, peak), graph = self.memory.get(node.name, Memory()), self.graph
        made = {self._first(value.name) for value in node.makes}
        own = [name for name in made if name in graph.makers and graph.makers[name] is node]
        gradients = sum(graph.spec(name).bytes for name in holds.late_gradients)
        memory = NodeBytes(
            kept=holds.own + sum(self.sizes.get(name, 0) for name in own if name in held),
            kept_for_weight_grad=holds.late_own + gradients + sum(self.sizes.get(n, 0) for n in own if n in late),
            peak=peak,
            parameters=self._state_bytes(node.parameters),
            buffers=self._state_bytes(node.buffers),
            inputs=sum(graph.spec(name).bytes for name in node.reads),
            outputs=sum(value.spec.bytes for value in node.makes),
        )
        return NodeCost(node.name, *self.times.get(node.name, Times()), memory, self._named(holds))

    def _named(self, holds: SavedTensors) -> SavedTensors:
        """Refer to storage by the first value in it; inputs of the model are kept in any case."""
        return SavedTensors(
            holds.own,
            self._shared(holds.values),
            holds.late_own,
            self._shared(holds.late_values),
            holds.late_gradients,
        )

    def _shared(self, values: tuple[str, ...]) -> tuple[str, ...]:
        names = dict.fromkeys(map(self._first, values))
        return tuple(name for name in names if name in self.graph.makers)

    def _state_bytes(self, names: tuple[str, ...]) -> int:
        return sum(self._state[name] for name in {self.graph.tensor_of(name) for name in names})

    @cached_property
    def _state(self) -> dict[str, int]:
        return {value.name: value.spec.bytes for value in (*self.graph.parameters, *self.graph.buffers)}

    def _first(self, value: str) -> str:
        return self._firsts.get(value, value)

    @cached_property
    def _firsts(self) -> dict[str, str]:
        return {name: group.values[0] for group in self.graph.storage for name in group.values}


@dataclass(frozen=True)
class _Rounds:
    """Iterates over the rounds in which everything is timed once."""

    iterations: int
    end: float
    """of time.monotonic(), after which no further round starts"""
    progress: Progress

    def __iter__(self) -> Iterator[int]:
        total = self.iterations + OUTLIERS
        for number in range(total):
            if number >= _MIN_ROUNDS and time.monotonic() > self.end:
                return
            yield number
            # Between rounds, as automatic collection is off; the youngest generation is enough.
            gc.collect(0)
            self.progress(number + 1, total)


class _Measurement:
    """One measurement of a model."""

    def __init__(self, subject: MeasuredModel, clock: Clock, rounds: _Rounds) -> None:
        self._subject, self._clock, self._rounds = subject, clock, rounds
        self._groups = group_equal_nodes(subject)
        self._times: dict[str, Times] = {}
        self._memory: dict[str, Memory] = {}
        self._wholes: list[Times] = []

    def findings(self) -> tuple[_NodeFindings, Times, tuple[float, float]]:
        """The findings, the times of the unsplit model, and the factors by which node times were scaled."""
        sizes = self._measure_nodes(node.name for group in self._groups for node in _timed_nodes(group))
        uneven = [node.name for group in self._groups if not self._is_even(group) for node in group]
        if others := set(uneven) - self._times.keys():
            self._measure_nodes(others)
        whole, times = Times.typical(self._wholes), self._all_times()
        factors = calibration(times.values(), whole)
        scaled = {name: each.scaled(*factors) for name, each in times.items()}
        return _NodeFindings(self._subject.graph, scaled, self._all_memory(), sizes), whole, factors

    def _measure_nodes(self, names: Iterable[str]) -> dict[str, int]:
        """Time some nodes, and find the memory of the first of every group; returns the bytes behind values."""
        chosen, firsts = set(names), {group[0].name for group in self._groups}
        timings: dict[str, Timing] = {}

        def visit(visited: NodeVisit) -> None:
            name = visited.node.name
            if name in chosen:
                timings[name] = Timing.of_node(visited, self._clock)
                if name in firsts:
                    self._memory[name] = memory_of(visited)

        sizes = visit_nodes(self._subject, visit)
        self._sample(timings)
        return sizes

    def _sample(self, timings: Mapping[str, Timing]) -> None:
        """Interleave nodes and the unsplit model, so that a machine that slows down affects all of them."""
        idle = Timing.of_nothing(self._subject, self._clock)
        for _ in self._rounds:
            # Discarded: it has to allocate the memory that the nodes freed, unlike a step that follows a step.
            time_whole(self._subject, self._clock)
            self._wholes.append(time_whole(self._subject, self._clock))
            for timing in (idle, *timings.values()):
                timing.sample()
        self._times |= {name: timing.typical.without(idle.typical) for name, timing in timings.items()}

    def _is_even(self, group: Sequence[Node]) -> bool:
        steps = [self._times[node.name].step for node in _timed_nodes(group) if node.name in self._times]
        return not steps or max(steps) <= max(_MAX_RATIO * min(steps), min(steps) + _MAX_DIFFERENCE_SECONDS)

    def _all_times(self) -> dict[str, Times]:
        """The times of every node; in an even group, the median of those that were timed."""
        times: dict[str, Times] = {}
        for group in self._groups:
            known = {node.name: self._times[node.name] for node in group if node.name in self._times}
            if known and self._is_even(group):
                times |= dict.fromkeys((node.name for node in group), Times.median(known.values()))
            else:
                times |= known
        return times

    def _all_memory(self) -> dict[str, Memory]:
        known = [(self._memory[group[0].name], group) for group in self._groups if group[0].name in self._memory]
        return {node.name: transfer_memory(memory, group[0], node) for memory, group in known for node in group}


def calibration(times: Collection[Times], whole: Times) -> tuple[float, float]:
    """The factors for forwards and backwards with which the sum of all nodes is the time of the unsplit model."""
    forward, backward = sum(each.forward for each in times), sum(each.backward for each in times)
    return whole.forward / forward if forward else 1.0, whole.backward / backward if backward else 1.0


def _timed_nodes(group: Sequence[Node]) -> list[Node]:
    if len(group) <= _MAX_TIMED:
        return list(group)
    return [group[0], group[len(group) // 2], group[-1]]


def estimate(subject: MeasuredModel, speed: DeviceSpeed, progress: Progress = no_progress) -> Profile:
    """Estimate the profile of a model on a device of that speed, from the work of its operations.

    Nothing is timed, so the same model always has the same profile. The model may be on the meta device, where its
    weights need no memory. It is left as it was.
    """
    groups = group_equal_nodes(subject)
    firsts = {group[0].name for group in groups}
    known: dict[str, tuple[Times, Memory]] = {}

    def visit(visited: NodeVisit) -> None:
        name = visited.node.name
        if name in firsts:
            # Timing runs the node once when it is made, so that the run counted here accumulates into gradients.
            times = Timing.of_node(visited, WorkCounter(speed)).once(1)
            known[name] = times, memory_of(visited)
            progress(len(known), len(groups))

    with subject.isolated(), fused_attention():
        sizes = visit_nodes(subject, visit)
    measured = [group for group in groups if group[0].name in known]
    times = {node.name: known[group[0].name][0] for group in measured for node in group}
    memory = {n.name: transfer_memory(known[group[0].name][1], group[0], n) for group in measured for n in group}
    return _NodeFindings(subject.graph, times, memory, sizes).profile(None, f"estimated at {speed}", _versions())


def _versions() -> tuple[tuple[str, str], ...]:
    """What the measurement depends on besides the model and the device."""
    return (("torch", str(torch.__version__)), ("threads", str(torch.get_num_threads())))
