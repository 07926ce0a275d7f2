"""Measures or estimates every node of a model alone, and combines the results into a Profile."""

import gc
import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from penstock.capture import device_of
from penstock.ir import DeviceSpeed, Graph, Node, NodeBytes, NodeCost, Profile
from penstock.measure.identity import group_equal_nodes, transfer_memory
from penstock.measure.measured_model import MeasuredModel, NodeVisit, Progress, no_progress, visit_nodes
from penstock.measure.memory import Memory, memory_of
from penstock.measure.timing import OUTLIERS, Clock, Times, Timing, device_name, time_whole, without_gc
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
    device, end = device_of(subject.model), time.monotonic() + budget_seconds
    with subject.isolated(), without_gc():
        measurement = _Measurement(subject, Clock(device), iterations, end, progress)
        sizes = measurement.run()
    whole, times = Times.typical(measurement.wholes), measurement.all_times()
    factors = calibration(times.values(), whole)
    times = {name: each.scaled(*factors) for name, each in times.items()}
    versions = (*_versions(), ("calibrated", "forward x{:.3f}, backward x{:.3f}".format(*factors)))
    memory = _memory_of_groups(measurement.groups, measurement.memory)
    profile = _profile(subject.graph, times, memory, sizes, whole.step, device_name(device), versions)
    return replace(profile, cpu_share=measurement.cpu_share)


class _Measurement:
    """Times of nodes and of the unsplit model, and the memory of the first node of every group of equal nodes."""

    def __init__(self, subject: MeasuredModel, clock: Clock, iterations: int, end: float, progress: Progress) -> None:
        """`end` is the moment of time.monotonic() after which no further round starts."""
        self._subject, self._clock, self._progress = subject, clock, progress
        self._num_rounds, self._end = iterations + OUTLIERS, end
        self._times: dict[str, Times] = {}
        self.groups = group_equal_nodes(subject)
        self.memory: dict[str, Memory] = {}
        self.wholes: list[Times] = []
        self.cpu_share = 0.0
        """of the unsplit model; the most of all rounds, as other load on the machine only takes CPU away"""

    def run(self) -> dict[str, int]:
        """Time some nodes of every group, and all nodes of uneven groups; returns the bytes behind values."""
        sizes = self._measure_nodes({node.name for group in self.groups for node in _timed_nodes(group)})
        uneven = {node.name for group in self.groups if not self._is_even(group) for node in group}
        if others := uneven - self._times.keys():
            self._measure_nodes(others)
        return sizes

    def _measure_nodes(self, chosen: Collection[str]) -> dict[str, int]:
        firsts = {group[0].name for group in self.groups}
        timings: dict[str, Timing] = {}

        def visit(visited: NodeVisit) -> None:
            name = visited.node.name
            if name in chosen:
                timings[name] = Timing.of_node(visited, self._clock)
                if name in firsts:
                    self.memory[name] = memory_of(visited)

        sizes = visit_nodes(self._subject, visit)
        empty = Timing.of_empty_run(self._subject, self._clock)
        # Rounds interleave nodes and the unsplit model, so that a machine that slows down affects all of them.
        for number in range(self._num_rounds):
            if number >= _MIN_ROUNDS and time.monotonic() > self._end:
                break
            # Discarded: it has to allocate the memory that the nodes freed, unlike a step that follows a step.
            time_whole(self._subject, self._clock)
            cpu, start = time.process_time(), time.perf_counter()
            self.wholes.append(time_whole(self._subject, self._clock))
            share = (time.process_time() - cpu) / max(time.perf_counter() - start, 1e-9)
            self.cpu_share = max(self.cpu_share, share)
            for timing in (empty, *timings.values()):
                timing.sample()
            # Between rounds, as automatic collection is off; the youngest generation is enough.
            gc.collect(0)
            self._progress(number + 1, self._num_rounds)
        self._times |= {name: timing.typical.without(empty.typical) for name, timing in timings.items()}
        return sizes

    def _is_even(self, group: Sequence[Node]) -> bool:
        steps = [self._times[node.name].step for node in _timed_nodes(group) if node.name in self._times]
        return not steps or max(steps) <= max(_MAX_RATIO * min(steps), min(steps) + _MAX_DIFFERENCE_SECONDS)

    def all_times(self) -> dict[str, Times]:
        """The times of every node; in an even group, the median of those that were timed."""
        times: dict[str, Times] = {}
        for group in self.groups:
            known = {node.name: self._times[node.name] for node in group if node.name in self._times}
            if known and self._is_even(group):
                known = dict.fromkeys((node.name for node in group), Times.median(known.values()))
            times |= known
        return times


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
    known: dict[str, tuple[Times, Memory, int]] = {}

    def visit(visited: NodeVisit) -> None:
        name = visited.node.name
        if name in firsts:
            # Timing runs the node once when it is made, so that the run counted here accumulates into gradients.
            times = Timing.of_node(visited, WorkCounter(speed)).once(1)
            forward = WorkCounter(speed)
            forward.seconds(visited.prepare(False))
            known[name] = times, memory_of(visited), forward.flops
            progress(len(known), len(groups))

    with subject.isolated(), fused_attention():
        sizes = visit_nodes(subject, visit)
    measured = [group for group in groups if group[0].name in known]
    times = {node.name: known[group[0].name][0] for group in measured for node in group}
    memory = _memory_of_groups(groups, {name: memory for name, (_, memory, _) in known.items()})
    seconds = math.fsum(each.step for each in times.values())
    flops = {node.name: known[group[0].name][2] for group in measured for node in group}
    return _profile(subject.graph, times, memory, sizes, seconds, f"estimated for {speed}", _versions(), flops)


def _memory_of_groups(groups: Iterable[Sequence[Node]], first: Mapping[str, Memory]) -> dict[str, Memory]:
    """The memory of every node, from that of the first node of its group."""
    known = [group for group in groups if group[0].name in first]
    return {node.name: transfer_memory(first[group[0].name], group[0], node) for group in known for node in group}


def _profile(
    graph: Graph,
    times: Mapping[str, Times],
    memories: Mapping[str, Memory],
    sizes: Mapping[str, int],
    step_seconds: float,
    device: str,
    versions: tuple[tuple[str, str], ...],
    flops: Mapping[str, int] | None = None,
) -> Profile:
    """The profile of a graph from its nodes, except those left out; `sizes` are bytes of storage behind values."""
    state_bytes = {value.name: value.spec.bytes for value in (*graph.parameters, *graph.buffers)}

    def shared(values: Iterable[str]) -> tuple[str, ...]:
        """Storage is named by the first value in it; inputs of the model are kept in any case."""
        return tuple(name for name in dict.fromkeys(map(graph.storage_of, values)) if name in graph.makers)

    def state(names: Iterable[str]) -> int:
        return sum(state_bytes[name] for name in {graph.tensor_of(name) for name in names})

    held = {name for memory in memories.values() for name in shared(memory.holds.values)}
    late = {name for memory in memories.values() for name in shared(memory.holds.late_values)}
    costs = []
    for node in graph.nodes:
        holds, peak = memories.get(node.name, Memory())
        made = {graph.storage_of(value.name) for value in node.makes}
        own = [name for name in made if name in graph.makers and graph.makers[name] is node]
        gradients = sum(graph.spec(name).bytes for name in holds.late_gradients)
        memory = NodeBytes(
            kept=holds.own + sum(sizes.get(name, 0) for name in own if name in held),
            kept_for_weight_grad=holds.late_own + gradients + sum(sizes.get(n, 0) for n in own if n in late),
            peak=peak,
            parameters=state(node.parameters),
            buffers=state(node.buffers),
            inputs=sum(graph.spec(name).bytes for name in node.reads),
            outputs=sum(value.spec.bytes for value in node.makes),
        )
        saved = replace(holds, values=shared(holds.values), late_values=shared(holds.late_values))
        counted = float((flops or {}).get(node.name, 0))
        costs.append(
            NodeCost(node.name, **times.get(node.name, Times())._asdict(), memory=memory, saved=saved, flops=counted)
        )
    pairs = tuple((name, size) for name, size in sizes.items() if graph.storage_of(name) == name)
    return Profile(tuple(costs), step_seconds, graph.fingerprint, device, versions, pairs)


def _versions() -> tuple[tuple[str, str], ...]:
    """What the measurement depends on besides the model and the device."""
    return (("torch", str(torch.__version__)), ("threads", str(torch.get_num_threads())))
