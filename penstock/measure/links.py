"""Measures latency and bandwidth between all ranks of a running process group by ping-pong messages."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import RunError
from penstock.ir import Cluster, Link
from penstock.launch import group_device
from penstock.measure.measured_model import Progress, no_progress

_MAX_SEQUENTIAL = 8
"""up to this many ranks, pairs are measured one after the other; beyond, disjoint pairs at the same time"""


@dataclass(frozen=True)
class Messages:
    """The sizes and numbers of messages."""

    small_bytes: int = 8
    large_bytes: int = 1 << 22
    small_times: int = 20
    large_times: int = 5
    max_seconds: float = 0.25
    """after which only one more message of a kind is sent: a slow link needs fewer samples"""


DEFAULT_MESSAGES = Messages()


def measure_links(
    group: Any = None, messages: Messages = DEFAULT_MESSAGES, progress: Progress = no_progress
) -> Cluster:
    """A Cluster with the links between the ranks of the group, the same on every rank; all ranks must call this.

    A small message there and back takes twice the latency; the bandwidth is from the extra time of a large one.
    """
    if not dist.is_initialized():
        raise RunError(
            "measure_links needs an initialized process group",
            hint="call it in a function that penstock.launch or torchrun runs, after init_process_group",
        )
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    # Latency and bandwidth from each rank to each other one; zero where another rank measures.
    results = torch.zeros(2, ranks, ranks, dtype=torch.float64, device=group_device(group))
    rounds = list(round_robin(ranks))
    for number, pairs in enumerate(rounds):
        for turn in [[pair] for pair in pairs] if ranks <= _MAX_SEQUENTIAL else [pairs]:
            # All other ranks wait, so that they do not disturb the measurement.
            dist.barrier(group)
            for first, second in turn:
                if rank in (first, second):
                    peer = second if rank == first else first
                    _Pair(group, peer, rank == first, messages).measure(results)
        progress(number + 1, len(rounds))
    dist.all_reduce(results, group=group)
    return _cluster(results.cpu())


def round_robin(ranks: int) -> Iterator[list[tuple[int, int]]]:
    """Rounds of disjoint pairs (a round-robin tournament) that contain every pair of ranks once."""
    circle: list[int | None] = [*range(ranks), *([None] if ranks % 2 else [])]
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None]
        circle = [circle[0], circle[-1], *circle[1:-1]]


class _Pair:
    """Two ranks that exchange messages: the first one sends and measures the time, the other one replies."""

    def __init__(self, group: Any, peer: int, is_timer: bool, messages: Messages) -> None:
        self._group, self._peer, self._is_timer, self._messages = group, peer, is_timer, messages
        self._small, self._large = (
            torch.zeros(size, dtype=torch.uint8, device=group_device(group))
            for size in (messages.small_bytes, messages.large_bytes)
        )

    def measure(self, results: Tensor) -> None:
        """Write latency and bandwidth of both directions, on the rank that measures."""
        few, many = self._messages.large_times, self._messages.small_times
        # The first messages establish connections and allocate memory.
        self._seconds(self._large, self._large, 1)
        both = self._seconds(self._small, self._small, many)
        there = self._seconds(self._large, self._small, few)
        back = self._seconds(self._small, self._large, few)
        if self._is_timer:
            rank, peer = dist.get_rank(self._group), self._peer
            results[0, rank, peer] = results[0, peer, rank] = both / 2
            extra = self._messages.large_bytes - self._messages.small_bytes
            # Where the difference is lost in noise, the time of the whole round trip is taken.
            results[1, rank, peer] = extra / (there - both if there > both else there)
            results[1, peer, rank] = extra / (back - both if back > both else back)

    def _seconds(self, request: Tensor, reply: Tensor, times: int) -> float:
        """The median time from a message to its reply; the first byte of a message marks the last one."""
        if not self._is_timer:
            is_last = False
            while not is_last:
                dist.recv(request, group=self._group, group_src=self._peer)
                dist.send(reply, group=self._group, group_dst=self._peer)
                is_last = bool(request[0])
            return 0.0
        samples: list[float] = []
        is_last = False
        while not is_last:
            is_last = len(samples) + 1 == times or sum(samples) > self._messages.max_seconds
            request[0] = is_last
            samples.append(self._round_trip(request, reply))
        return median(samples)

    def _round_trip(self, request: Tensor, reply: Tensor) -> float:
        start = time.perf_counter()
        dist.send(request, group=self._group, group_dst=self._peer)
        dist.recv(reply, group=self._group, group_src=self._peer)
        _synchronize(reply)
        return time.perf_counter() - start


def _cluster(results: Tensor) -> Cluster:
    latency, bandwidth = results[0].tolist(), results[1].tolist()
    ranks = len(latency)
    pairs = [(source, target) for source in range(ranks) for target in range(ranks) if source != target]
    links = tuple(Link(source, target, latency[source][target], bandwidth[source][target]) for source, target in pairs)
    if not links:
        return Cluster(ranks)
    typical = median(link.latency for link in links), median(bandwidth[source][target] for source, target in pairs)
    return Cluster(ranks, None, *typical, links=links)


def _synchronize(tensor: Tensor) -> None:
    if not tensor.is_cpu:
        torch.accelerator.synchronize(tensor.device)
