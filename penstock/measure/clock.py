"""Clock: how long calls take on a device, and what is typical among several."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

OUTLIERS = 2
"""the largest so many of a series are dropped: what else happens on a machine only ever adds"""


class Clock:
    """Tells the seconds of a call, once the device is done with it, without those in which it waited for a core.

    Where the system tells how long a thread was ready and others ran in its place, as Linux does, that does not count:
    on a shared machine it would be more than the work. Time asleep does count.
    """

    def __init__(self, device: torch.device) -> None:
        self._has_queue = device.type not in ("cpu", "meta")

    def seconds(self, call: Callable[[], Any]) -> tuple[float, Any]:
        """The seconds of a call, and what it returns."""
        self._settle()
        start = time.perf_counter()
        # Asked inside: what is waited outside of these two is in neither figure.
        waited = waited_seconds()
        result = call()
        self._settle()
        waited = waited_seconds() - waited
        return time.perf_counter() - start - waited, result

    def _settle(self) -> None:
        if self._has_queue:
            torch.accelerator.synchronize()


def waited_seconds() -> float:
    """How long this thread has been ready to run while others had the cores, ever since; 0 where nobody counts."""
    try:
        with open("/proc/thread-self/schedstat", "rb", buffering=0) as file:
            return int(file.read().split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        return 0.0


def typical(samples: Sequence[float]) -> float:
    """The median without the largest ones, if more are left."""
    kept = sorted(samples)
    return median(kept[:-OUTLIERS] if len(kept) > OUTLIERS else kept)


@contextmanager
def uncollected() -> Iterator[None]:
    """Inside, Python does not look for garbage at times of its own."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
