"""Measures several ways to take a step, interleaved on all ranks, so that other load disturbs them equally."""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch.distributed as dist

_WATCH = "penstock-watch"
Runs = Mapping[str, Callable[[], object]]


class Turn(NamedTuple):
    """One step on one rank: when it began and ended, the CPU seconds of the process, and its watch's part of them."""

    start: float
    end: float
    cpu: float
    watch: float


class Step(NamedTuple):
    """One step on all ranks: seconds from the first start to the last end, and CPU seconds of all together."""

    seconds: float
    cpu: float


def take_turns(
    runs: Runs, times: int, warm_up: int = 1, between: Callable[[], object] = lambda: None
) -> dict[str, list[Turn]]:
    """On one rank: every run in turn, so many times; the first ones are not kept, nor what happens between."""
    found: dict[str, list[Turn]] = {name: [] for name in runs}
    for number in range(warm_up + times):
        for name, run in runs.items():
            between()
            turn = _turn(run)
            if number >= warm_up:
                found[name].append(turn)
    return found


def joined(ranks: Sequence[Mapping[str, list[Turn]]], ours: Sequence[str] = ("penstock",)) -> dict[str, list[Step]]:
    """What all ranks measured; the watch counts for penstock only, though it also looks while others run."""
    return {
        name: [_step(turns, name in ours) for turns in zip(*(rank[name] for rank in ranks), strict=True)]
        for name in ranks[0]
    }


def load() -> str:
    """How many processes wanted to run during the last minute, those of others included."""
    return f"{os.getloadavg()[0]:.1f}"


def _step(turns: Sequence[Turn], has_watch: bool) -> Step:
    seconds = max(turn.end for turn in turns) - min(turn.start for turn in turns)
    return Step(seconds, sum(turn.cpu - (0.0 if has_watch else turn.watch) for turn in turns))


def _turn(run: Callable[[], object]) -> Turn:
    if dist.is_initialized():
        dist.barrier()
    watched, worked, start = _watch_seconds(), time.process_time(), time.perf_counter()
    run()
    end, cpu = time.perf_counter(), time.process_time() - worked
    return Turn(start, end, cpu, _watch_seconds() - watched)


def _watch_seconds() -> float:
    watches = [thread.ident for thread in threading.enumerate() if thread.name == _WATCH and thread.ident]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in watches)
