"""DeviceSpeed: how fast a device computes and moves bytes, from which the seconds of a model are estimated."""

from dataclasses import dataclass

from penstock.errors import CostError
from penstock.ir.figures import is_finite


@dataclass(frozen=True)
class DeviceSpeed:
    """What a device does at best: `DeviceSpeed(3e14, 2e12)` is about one large GPU in half precision.

    An operation takes as long as its arithmetic or as moving what it reads and writes, whichever is longer.
    """

    flops_per_second: float
    bytes_per_second: float
    operation_seconds: float = 0.0
    """that every operation takes besides, however small"""

    def __post_init__(self) -> None:
        for name in ("flops_per_second", "bytes_per_second"):
            value = getattr(self, name)
            if not is_finite(value) or value <= 0:
                raise CostError(f"{name} must be a finite number above 0", value=repr(value), hint="such as 1e12")
        if not is_finite(self.operation_seconds) or self.operation_seconds < 0:
            raise CostError("operation_seconds must be finite seconds, 0 or more", value=repr(self.operation_seconds))

    def seconds(self, flops: float, num_bytes: float) -> float:
        """How long one operation takes."""
        return max(flops / self.flops_per_second, num_bytes / self.bytes_per_second) + self.operation_seconds

    def __str__(self) -> str:
        return f"{self.flops_per_second:.3g} flop/s, {self.bytes_per_second:.3g} B/s"
