"""Times calls on a device, and computes a robust average of several times."""

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple

import torch

OUTLIERS = 2
"""this many of the largest samples are dropped: other work on the machine only ever adds time"""


class Clock:
    """Measures the seconds of a call, including its work on the device, without the time waiting for a core.

    Linux reports how long a thread was ready to run while others ran; on a shared machine that may be more than the
    work itself. Time asleep counts. On a device with a queue, the time is that between two events on the queue.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._has_queue = device, device.type not in ("cpu", "meta")

    def seconds(self, call: Callable[[], Any]) -> tuple[float, Any]:
        """The seconds of a call, and its result."""
        if self._has_queue:
            started, ended = (torch.Event(self._device, enable_timing=True) for _ in range(2))
            started.record()
            result = call()
            ended.record()
            ended.synchronize()
            return 1e-3 * started.elapsed_time(ended), result
        start = time.perf_counter()
        # Read between the two readings of the clock, so that only waiting inside the timed interval is subtracted.
        waited = waited_seconds()
        result = call()
        waited = waited_seconds() - waited
        return time.perf_counter() - start - waited, result


def waited_seconds() -> float:
    """How long this thread has been ready to run while others had the cores; 0 where the system does not report it."""
    try:
        with open("/proc/thread-self/schedstat", "rb", buffering=0) as file:
            return int(file.read().split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        return 0.0


def typical(samples: Sequence[float]) -> float:
    """The median without the OUTLIERS largest samples, if there are more."""
    kept = sorted(samples)
    return median(kept[:-OUTLIERS] if len(kept) > OUTLIERS else kept)


@contextmanager
def without_gc() -> Iterator[None]:
    """Disable automatic garbage collection inside."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_MIN_SHARE = 0.05
"""the share of a time that is kept at least when the overhead is subtracted, because both are noisy"""


class Times(NamedTuple):
    """Seconds of the four passes of a node; a full backward is not the sum of its two parts."""

    forward: float = 0.0
    backward: float = 0.0
    input_grad: float = 0.0
    weight_grad: float = 0.0

    @property
    def step(self) -> float:
        """Forward and full backward."""
        return self.forward + self.backward

    def without(self, other: "Times") -> "Times":
        """The times without the overhead of a run; a small share always remains."""
        return Times(*(max(mine - theirs, _MIN_SHARE * mine) for mine, theirs in zip(self, other, strict=True)))

    def scaled(self, forward: float, backward: float) -> "Times":
        """The times scaled by one factor for the forward and one for all backwards."""
        return Times(self.forward * forward, *(seconds * backward for seconds in self[1:]))

    @classmethod
    def typical(cls, samples: Iterable["Times"]) -> "Times":
        """The typical of each pass."""
        return cls(*map(typical, zip(*samples, strict=True)))

    @classmethod
    def median(cls, samples: Iterable["Times"]) -> "Times":
        """The median of each pass."""
        return cls(*map(median, zip(*samples, strict=True)))
