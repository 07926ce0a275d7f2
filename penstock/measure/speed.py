"""Speed: what the device here does at best, found in a moment by one product, one copy and one tiny operation."""

import torch

from penstock.ir import DeviceSpeed
from penstock.measure.clock import Clock

_ROWS = {"cpu": 768, "cuda": 8192}
_COPIED_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}
_TIMES, _TINY_TIMES = 5, 200


def measure_speed(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> DeviceSpeed:
    """The speed of a device in products of matrices of a type, in copies, and in doing next to nothing.

    A CPU is asked in float32: some lack what products of other types need.
    """
    device = torch.device(device)
    clock, kind = Clock(device), "cpu" if device.type == "cpu" else "cuda"
    rows = _ROWS[kind]
    one = torch.ones(rows, rows, device=device, dtype=torch.float32 if kind == "cpu" else dtype)
    product = min(clock.seconds(lambda: one @ one)[0] for _ in range(_TIMES))
    source = torch.ones(_COPIED_BYTES[kind], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = min(clock.seconds(lambda: target.copy_(source))[0] for _ in range(_TIMES))
    tiny = torch.ones(1, device=device)
    many, _ = clock.seconds(lambda: [tiny + tiny for _ in range(_TINY_TIMES)])
    return DeviceSpeed(2 * rows**3 / product, 2 * source.nbytes / copy, many / _TINY_TIMES)
