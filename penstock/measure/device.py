"""The name and the speed of a device."""

import platform
from contextlib import suppress
from functools import cache

import torch

from penstock.ir import DeviceSpeed
from penstock.measure.clock import Clock

_ROWS = {"cpu": 768, "cuda": 8192}
_COPIED_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}
_REPEATS, _TINY_REPEATS = 5, 200


@cache
def device_name(device: torch.device) -> str:
    """The name of the device, as its maker calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {_processor()}" if device.type == "cpu" else str(device)


def _processor() -> str:
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


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
    return DeviceSpeed(2 * rows**3 / product, 2 * source.nbytes / copy, many / _TINY_REPEATS)
