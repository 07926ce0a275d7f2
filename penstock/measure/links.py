"""Measures latency and bandwidth between all ranks of a running process group, and the copies of a message."""

import mmap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import RunError
from penstock.ir import Cluster, Link, MessageCpu
from penstock.launch import group_device
from penstock.measure.measured_model import Progress, no_progress
from penstock.measure.timing import Clock

_MAX_SEQUENTIAL = 8
"""up to this many ranks, pairs are measured one after the other; beyond, disjoint pairs at the same time"""


@dataclass(frozen=True)
class ProbeMessages:
    """The sizes and numbers of the messages that `measure_links` sends."""

    small_bytes: int = 8
    large_bytes: int = 1 << 22
    small_times: int = 20
    large_times: int = 5
    max_seconds: float = 0.25
    """after which only one more message of a kind is sent: a slow link needs fewer samples"""


DEFAULT_MESSAGES = ProbeMessages()


def measure_links(
    group: Any = None, messages: ProbeMessages = DEFAULT_MESSAGES, progress: Progress = no_progress
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
                    _measure_pair(group, peer, rank == first, messages, results)
        progress(number + 1, len(rounds))
    dist.all_reduce(results, group=group)
    latency, bandwidth = results.cpu().tolist()
    pairs = [(source, target) for source in range(ranks) for target in range(ranks) if source != target]
    links = tuple(Link(source, target, latency[source][target], bandwidth[source][target]) for source, target in pairs)
    if not links:
        return Cluster(ranks)
    return Cluster(
        ranks,
        latency=median(link.latency for link in links),
        bandwidth=median(bandwidth[source][target] for source, target in pairs),
        links=links,
    )


_COPIED_BYTES, _COPIES = (1 << 19, 1 << 22, 1 << 24, 48 << 20), 8
"""sizes of messages, and copies of each; malloc returns memory of the last size to the system whenever it is freed"""


def measure_copies(sizes: Sequence[int] = _COPIED_BYTES) -> tuple[MessageCpu, ...]:
    """CPU seconds of messages between two processes of this machine, by their size.

    The sender copies a message into shared memory, and the receiver copies it out, into memory of its own.
    """
    clock, found = Clock(torch.device("cpu")), []
    for size in sizes:
        memory, source = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
        samples: list[tuple[float, float]] = []
        for _ in range(_COPIES):
            source += 1  # just computed, as a message is
            sending, _ = clock.seconds(partial(memory.copy_, source))
            # The previous copy is still there: a rank keeps what it received until its backward.
            receiving, copied = clock.seconds(memory.clone)
            samples.append((sending, receiving))
        del copied
        # The first ones also get pages from the system. Of the others the least: other load only ever adds.
        send_seconds, receive_seconds = map(min, zip(*samples[_COPIES // 2 :], strict=True))
        found.append(MessageCpu(size, send_seconds, receive_seconds))
    return tuple(found)


def round_robin(ranks: int) -> Iterator[list[tuple[int, int]]]:
    """Rounds of disjoint pairs (a round-robin tournament) that contain every pair of ranks once."""
    circle: list[int | None] = [*range(ranks), *([None] if ranks % 2 else [])]
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None]
        circle = [circle[0], circle[-1], *circle[1:-1]]


def _measure_pair(group: Any, peer: int, is_timer: bool, messages: ProbeMessages, results: Tensor) -> None:
    """Exchange messages with a peer; the timer sends, measures the time and writes `results`, the other one replies."""
    small, large = (
        torch.zeros(size, dtype=torch.uint8, device=group_device(group))
        for size in (messages.small_bytes, messages.large_bytes)
    )

    def seconds(request: Tensor, reply: Tensor, times: int) -> float:
        """The median time from a message to its reply; the first byte of a message marks the last one."""
        samples: list[float] = []
        is_last = False
        while not is_last:
            if is_timer:
                is_last = len(samples) + 1 == times or sum(samples) > messages.max_seconds
                request[0] = is_last
                start = time.perf_counter()
                dist.send(request, group=group, group_dst=peer)
                dist.recv(reply, group=group, group_src=peer)
                if not reply.is_cpu:
                    torch.accelerator.synchronize(reply.device)
                samples.append(time.perf_counter() - start)
            else:
                dist.recv(request, group=group, group_src=peer)
                dist.send(reply, group=group, group_dst=peer)
                is_last = bool(request[0])
        return median(samples) if samples else 0.0

    # The first messages establish connections and allocate memory.
    seconds(large, large, 1)
    both = seconds(small, small, messages.small_times)
    there = seconds(large, small, messages.large_times)
    back = seconds(small, large, messages.large_times)
    if is_timer:
        rank, extra = dist.get_rank(group), messages.large_bytes - messages.small_bytes
        results[0, rank, peer] = results[0, peer, rank] = both / 2
        # Where the difference is lost in noise, the time of the whole round trip is taken.
        results[1, rank, peer] = extra / (there - both if there > both else there)
        results[1, peer, rank] = extra / (back - both if back > both else back)
