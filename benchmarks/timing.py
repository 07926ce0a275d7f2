"""CPU time of a call, and times of several calls that are interleaved, so that other load affects all of them."""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

_MONITOR_THREAD = "penstock-watch"
Calls = Mapping[str, Callable[[], object]]


class RankTiming(NamedTuple):
    """One call on one rank: start, end, CPU seconds of the process, and those of penstock's monitor thread in it."""

    start: float
    end: float
    cpu: float
    monitor_cpu: float


class StepTiming(NamedTuple):
    """One call on all ranks: seconds from the first start to the last end, and CPU seconds summed over ranks."""

    seconds: float
    cpu: float


def cpu_seconds(call: Callable[[], object], repeats: int = 1) -> float:
    """Returns the minimum CPU seconds of a call; other load on the machine can only add to it."""

    def once() -> float:
        start = time.process_time()
        call()
        return time.process_time() - start

    return min(once() for _ in range(repeats))


def run_interleaved(
    calls: Calls, repeats: int, warmup: int = 1, before_each: Callable[[], object] = lambda: None
) -> dict[str, list[RankTiming]]:
    """Runs all calls one after another, `warmup + repeats` times, and returns this rank's times after the warmup.

    Every other time in reverse order: a call finds other caches and idle cores depending on the one before it.
    `before_each` runs before every call and is not timed.
    """
    timings: dict[str, list[RankTiming]] = {name: [] for name in calls}
    for number in range(warmup + repeats):
        order = list(calls.items())
        for name, call in reversed(order) if number % 2 else order:
            before_each()
            timing = _time_call(call)
            if number >= warmup:
                timings[name].append(timing)
    return timings


def combine_ranks(
    ranks: Sequence[Mapping[str, list[RankTiming]]], penstock_calls: Sequence[str] = ("penstock",)
) -> dict[str, list[StepTiming]]:
    """Combines the times of all ranks.

    penstock's monitor thread runs during every call. Its CPU time counts for `penstock_calls` only.
    """
    return {
        name: [
            _combine(timings, name in penstock_calls) for timings in zip(*(rank[name] for rank in ranks), strict=True)
        ]
        for name in ranks[0]
    }


def load_average() -> str:
    """The load average of the last minute, which includes other processes on this machine."""
    return f"{os.getloadavg()[0]:.1f}"


def _combine(timings: Sequence[RankTiming], includes_monitor: bool) -> StepTiming:
    seconds = max(timing.end for timing in timings) - min(timing.start for timing in timings)
    return StepTiming(
        seconds, sum(timing.cpu - (0.0 if includes_monitor else timing.monitor_cpu) for timing in timings)
    )


def _time_call(call: Callable[[], object]) -> RankTiming:
    # Imported here because `planning` measures its imports, which do without torch.
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
    monitor, cpu, start = _monitor_seconds(), time.process_time(), time.perf_counter()
    call()
    end, cpu = time.perf_counter(), time.process_time() - cpu
    return RankTiming(start, end, cpu, _monitor_seconds() - monitor)


def _monitor_seconds() -> float:
    threads = [thread.ident for thread in threading.enumerate() if thread.name == _MONITOR_THREAD and thread.ident]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in threads)
