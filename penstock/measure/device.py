"""Device: where a model is, and what that device is called."""

import platform
from contextlib import suppress
from functools import cache
from itertools import chain

import torch
from torch import nn


def home_of(model: nn.Module) -> torch.device:
    """The device of the model: that of its first parameter or buffer."""
    for tensor in chain(model.parameters(), model.buffers()):
        return tensor.device
    return torch.device("cpu")


@cache
def device_name(device: torch.device) -> str:
    """What the device is called by who made it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {_processor()}" if device.type == "cpu" else str(device)


def _processor() -> str:
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
