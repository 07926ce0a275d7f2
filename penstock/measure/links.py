"""Links: latency and bandwidth between all ranks of a running group, found by sending messages to and fro."""

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
from penstock.measure.subject import Tell, silent

_MOST_APART = 8
"""of so many ranks all pairs are measured one after the other; of more, those that share no rank at once"""


@dataclass(frozen=True)
class Messages:
    """What is sent to and fro."""

    small_bytes: int = 8
    large_bytes: int = 1 << 22
    small_times: int = 20
    large_times: int = 5
    most_seconds: float = 0.25
    """after so long only one more message of a kind is sent: a slow link needs no more to be told"""


USUAL = Messages()


def measure_links(group: Any = None, messages: Messages = USUAL, tell: Tell = silent) -> Cluster:
    """A Cluster with the links between the ranks of the group, the same on every rank; all of them must call this.

    A small message there and back takes twice the latency; what a large one takes more on its way is its bandwidth.
    """
    if not dist.is_initialized():
        raise RunError(
            "links are measured between the ranks of a running group",
            hint="call it in a function that penstock.launch or torchrun runs, after init_process_group",
        )
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    found = torch.zeros(2, ranks, ranks, dtype=torch.float64, device=_device(group))
    rounds = list(tournament(ranks))
    for number, pairs in enumerate(rounds):
        for turn in [[pair] for pair in pairs] if ranks <= _MOST_APART else [pairs]:
            # Those who are not asked are quiet.
            dist.barrier(group)
            for one, other in turn:
                if rank in (one, other):
                    _Pair(group, other if rank == one else one, rank == one, messages).measure(found)
        tell(number + 1, len(rounds))
    dist.all_reduce(found, group=group)
    return _cluster(found.cpu())


def tournament(ranks: int) -> Iterator[list[tuple[int, int]]]:
    """Rounds of pairs in which every rank meets every other once, and none has two partners at a time."""
    circle: list[int | None] = [*range(ranks), *([None] if ranks % 2 else [])]
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None]
        circle = [circle[0], circle[-1], *circle[1:-1]]


class _Pair:
    """Two ranks, of which the first asks and takes the time, and the other answers."""

    def __init__(self, group: Any, peer: int, asks: bool, messages: Messages) -> None:
        self._group, self._peer, self._asks, self._messages = group, peer, asks, messages
        self._small, self._large = (
            torch.zeros(size, dtype=torch.uint8, device=_device(group))
            for size in (messages.small_bytes, messages.large_bytes)
        )

    def measure(self, found: Tensor) -> None:
        """Write latency and bandwidth of both directions, if this rank asks."""
        few, many = self._messages.large_times, self._messages.small_times
        # The first messages make connections and memory.
        self._seconds(self._large, self._large, 1)
        both = self._seconds(self._small, self._small, many)
        there = self._seconds(self._large, self._small, few)
        back = self._seconds(self._small, self._large, few)
        if self._asks:
            rank, peer = dist.get_rank(self._group), self._peer
            found[0, rank, peer] = found[0, peer, rank] = both / 2
            extra = self._messages.large_bytes - self._messages.small_bytes
            # A link that is too fast to tell is taken to be as fast as the whole way.
            found[1, rank, peer] = extra / (there - both if there > both else there)
            found[1, peer, rank] = extra / (back - both if back > both else back)

    def _seconds(self, question: Tensor, answer: Tensor, times: int) -> float:
        """The median of the time from a question to its answer; a question tells whether it is the last one."""
        if not self._asks:
            while not self._reply(question, answer):
                pass
            return 0.0
        found: list[float] = []
        is_last = False
        while not is_last:
            is_last = len(found) + 1 == times or sum(found) > self._messages.most_seconds
            question[0] = is_last
            found.append(self._ask(question, answer))
        return median(found)

    def _ask(self, question: Tensor, answer: Tensor) -> float:
        start = time.perf_counter()
        dist.send(question, group=self._group, group_dst=self._peer)
        dist.recv(answer, group=self._group, group_src=self._peer)
        _settle(answer)
        return time.perf_counter() - start

    def _reply(self, question: Tensor, answer: Tensor) -> bool:
        dist.recv(question, group=self._group, group_src=self._peer)
        dist.send(answer, group=self._group, group_dst=self._peer)
        return bool(question[0])


def _cluster(found: Tensor) -> Cluster:
    latency, bandwidth = found[0].tolist(), found[1].tolist()
    ranks = len(latency)
    pairs = [(source, target) for source in range(ranks) for target in range(ranks) if source != target]
    links = tuple(Link(source, target, latency[source][target], bandwidth[source][target]) for source, target in pairs)
    if not links:
        return Cluster(ranks)
    usual = median(link.latency for link in links), median(bandwidth[source][target] for source, target in pairs)
    return Cluster(ranks, None, *usual, links=links)


def _device(group: Any) -> torch.device:
    is_nccl = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")


def _settle(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
