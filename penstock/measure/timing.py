"""Times calls on a device, one node alone or the unsplit model, and measures the speed of a device."""

import gc
import math
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.ir import DeviceSpeed
from penstock.measure.measured_model import MeasuredModel, NodeRun, NodeVisit
from penstock.measure.work import WorkCounter

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
        return cls(*map(typical, zip(*samples, strict=True)))

    @classmethod
    def median(cls, samples: Iterable["Times"]) -> "Times":
        return cls(*map(median, zip(*samples, strict=True)))


_SAMPLE_SECONDS, _MAX_REPEATS = 0.005, 32
"""shorter runs are repeated several times in a row, as reading the clock would disturb them"""
Prepare = Callable[[bool], Callable[[], NodeRun]]
Gradients = Callable[[dict[str, Any]], dict[str, Tensor]]


class Timing:
    """Repeated timing of a node, or of an empty run; the first run warms up and sets the number of repeats."""

    def __init__(self, prepare: Prepare, gradients: Gradients, clock: Clock | WorkCounter) -> None:
        self._prepare, self._gradients, self._clock = prepare, gradients, clock
        first = self.once(1)
        self._repeats = min(max(math.ceil(_SAMPLE_SECONDS / max(first.step, 1e-9)), 1), _MAX_REPEATS)
        self._samples: list[Times] = []

    @classmethod
    def of_node(cls, visited: NodeVisit, clock: Clock | WorkCounter) -> "Timing":
        """The timing of a node on the values that it reads."""
        return cls(visited.prepare, visited.gradients, clock)

    @classmethod
    def of_empty_run(cls, subject: MeasuredModel, clock: Clock | WorkCounter) -> "Timing":
        """The timing of a run without a node, which is the overhead."""
        like = next(iter(subject.model.parameters()), torch.zeros(0))
        values = {"x": torch.ones(1, device=like.device, requires_grad=True)}

        def gradients(outputs: dict[str, Any]) -> dict[str, Tensor]:
            return {name: torch.ones_like(value, requires_grad=False) for name, value in outputs.items()}

        return cls(lambda splits_backward: subject.prepare_empty_run(values, splits_backward), gradients, clock)

    def sample(self) -> None:
        self._samples.append(self.once(self._repeats))

    @property
    def typical(self) -> Times:
        return Times.typical(self._samples)

    def once(self, times: int) -> Times:
        """Run `times` forwards with full backwards, and as many with split ones; the seconds of one of each."""
        prepared = [self._prepare(False) for _ in range(times)]
        forward, runs = self._clock.seconds(lambda: [run() for run in prepared])
        given = [self._gradients(run.take_outputs()) for run in runs]
        if not any(given) and not any(run.adds_loss for run in runs):
            return Times(forward / times)
        backward, _ = self._clock.seconds(lambda: [run.backward(g) for run, g in zip(runs, given, strict=True)])
        runs = [self._prepare(True)() for _ in range(times)]
        given = [self._gradients(run.take_outputs()) for run in runs]
        input_grad, _ = self._clock.seconds(lambda: [run.input_grad(g) for run, g in zip(runs, given, strict=True)])
        weight_grad, _ = self._clock.seconds(lambda: [run.weight_grad() for run in runs])
        return Times(forward / times, backward / times, input_grad / times, weight_grad / times)


def time_whole(subject: MeasuredModel, clock: Clock | WorkCounter) -> Times:
    """One forward and backward of the unsplit model."""
    forward, roots = clock.seconds(subject.prepare_whole())
    given = [torch.ones_like(root, requires_grad=False) for root in roots]
    backward, _ = clock.seconds(lambda: torch.autograd.backward(roots, given) if roots else None)
    return Times(forward, backward)


# The device

_ROWS = {"cpu": 768, "cuda": 8192}
"""of the square matrices that `measure_speed` multiplies"""
_COPIED_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}
_REPEATS, _TINY_REPEATS = 5, 200
"""times that a product or copy is timed, of which the shortest counts, and tiny operations that are timed together"""


@cache
def device_name(device: torch.device) -> str:
    """The name of the device, as its maker calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return str(device)
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return f"cpu, {line.partition(':')[2].strip()}"
    return f"cpu, {platform.processor() or platform.machine()}"


def measure_speed(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> DeviceSpeed:
    """The speed of a device, measured quickly by matrix products, copies, and tiny operations.

    A CPU is measured in float32: some lack fast products of other types.
    """
    device = torch.device(device)
    clock, kind = Clock(device), "cpu" if device.type == "cpu" else "cuda"
    rows = _ROWS[kind]
    matrix = torch.ones(rows, rows, device=device, dtype=torch.float32 if kind == "cpu" else dtype)
    product = min(clock.seconds(lambda: matrix @ matrix)[0] for _ in range(_REPEATS))
    source = torch.ones(_COPIED_BYTES[kind], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = min(clock.seconds(lambda: target.copy_(source))[0] for _ in range(_REPEATS))
    tiny = torch.ones(1, device=device)
    many, _ = clock.seconds(lambda: [tiny + tiny for _ in range(_TINY_REPEATS)])
    name = f"this machine ({device_name(device)})"
    return DeviceSpeed(2 * rows**3 / product, 2 * source.nbytes / copy, many / _TINY_REPEATS, name=name)
