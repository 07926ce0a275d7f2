"""The speed of a device, and presets of devices and links, to plan for machines that are not here."""

from dataclasses import dataclass, field
from functools import cached_property

from penstock.errors import CostError
from penstock.ir.arguments import find_named, is_finite
from penstock.ir.cluster import Cluster, Link, LinkSpeed

GIB = 2**30
_HALF = ("bfloat16", "float16")
_SHARE = 0.8
"""share of the datasheet's rate that is assumed where no measurement is cited"""
_MEMORY_SHARE = 0.9
"""share of the datasheet's memory bandwidth that is assumed for all devices"""


@dataclass(frozen=True)
class DeviceSpeed:
    """Achieved rates of a device, to estimate a model without running it; `DeviceSpeed.named("h100")` is a preset.

    `DeviceSpeed(3e14, 2e12)` is about one large GPU in half precision. An operation takes as long as its arithmetic or
    as moving the bytes that it reads and writes, whichever is longer.
    """

    flops_per_second: float
    """floating-point operations per second"""
    bytes_per_second: float
    """bytes read and written per second"""
    operation_seconds: float = 0.0
    """overhead of every operation, however small"""
    name: str = field(default="", kw_only=True)
    """of the device, for texts"""
    rates: tuple[tuple[str, float], ...] = field(default=(), kw_only=True)
    """operations per second by dtype, for those with a rate of their own"""

    def __post_init__(self) -> None:
        for name in ("flops_per_second", "bytes_per_second"):
            value = getattr(self, name)
            if not is_finite(value) or value <= 0:
                raise CostError(f"{name} must be a finite number above 0", value=repr(value), hint="such as 1e12")
        if not is_finite(self.operation_seconds) or self.operation_seconds < 0:
            raise CostError("operation_seconds must be finite seconds, 0 or more", value=repr(self.operation_seconds))
        for dtype, rate in self.rates:
            if not is_finite(rate) or rate <= 0:
                raise CostError("rates must be finite numbers above 0", dtype=dtype, rate=repr(rate))

    @classmethod
    def named(cls, name: str) -> "DeviceSpeed":
        """The achieved rates of a device by name.

        Args:
            name: such as "a100", "h100", "h200", "b200", "l4" or "rtx4090"; `penstock.ir.DEVICES` has all of them

        Raises:
            CostError: if no preset has that name
        """
        found, device = find_device(name)
        return device.speed(found)

    @cached_property
    def _rates(self) -> dict[str, float]:
        return dict(self.rates)

    def seconds(self, flops: float, num_bytes: float, dtype: str = "") -> float:
        """Seconds of one operation on tensors of a dtype."""
        rate = self._rates.get(dtype, self.flops_per_second)
        return max(flops / rate, num_bytes / self.bytes_per_second) + self.operation_seconds

    def __str__(self) -> str:
        rates = [f"{self.flops_per_second:.3g} flop/s", *(f"{rate:.3g} in {dtype}" for dtype, rate in self.rates)]
        text = f"{', '.join(rates)}, {self.bytes_per_second:.3g} B/s"
        return f"{self.name}: {text}" if self.name else text


@dataclass(frozen=True)
class Device:
    """A device: rates of its datasheet without sparsity, and the share of them that matrix products achieve."""

    half: float
    """datasheet, flop/s of bfloat16 and float16"""
    single: float
    """datasheet, flop/s of float32 without TF32, which is torch's default"""
    bandwidth: float
    """datasheet, bytes per second of its memory"""
    memory: int
    """bytes"""
    share: float = _SHARE
    """achieved share of the datasheet's flop/s, measured with large matrix products in bfloat16"""
    source: str = "assumed"
    """where that share was measured, or "assumed" """
    within: str = "pcie"
    """the link between devices of a node"""
    across: str = "400G"
    """the link between nodes, per device"""

    def peak_flops(self, dtype: str) -> float:
        """The datasheet's flop/s of a dtype, by which model flops utilization (MFU) is defined."""
        return self.half if dtype in _HALF else self.single

    def speed(self, name: str) -> DeviceSpeed:
        """The achieved rates."""
        rates = tuple((dtype, self.share * self.half) for dtype in _HALF)
        return DeviceSpeed(self.share * self.single, _MEMORY_SHARE * self.bandwidth, name=name, rates=rates)


# Datasheets: NVIDIA A100, H100, H200, L4 and L40S datasheets, DGX B200 datasheet, GeForce Ampere and Ada whitepapers
# (float32 accumulation), AMD MI300X data sheet; all without sparsity. Shares: "Maximum Achievable Matmul FLOPS", table
# of BF16 in S. Bekman, Machine Learning Engineering, compute/accelerator (A100 SXM 271.2 of 312, H100 SXM 794.5 of 989,
# MI300X 668.4 of 1300).
_MAMF = "Bekman, Machine Learning Engineering, maximum achievable matmul"
DEVICES: dict[str, Device] = {
    "a100": Device(312e12, 19.5e12, 2.039e12, 80 * GIB, 0.869, _MAMF, "nvlink3", "200G"),
    "a100-40gb": Device(312e12, 19.5e12, 1.555e12, 40 * GIB, 0.869, _MAMF, "nvlink3", "200G"),
    "h100": Device(989e12, 67e12, 3.35e12, 80 * GIB, 0.803, _MAMF, "nvlink4"),
    "h200": Device(989e12, 67e12, 4.8e12, 141_000_000_000, 0.803, f"{_MAMF}, H100", "nvlink4"),
    "b200": Device(2250e12, 80e12, 8e12, 180_000_000_000, within="nvlink5"),
    "mi300x": Device(1307e12, 163.4e12, 5.3e12, 192 * GIB, 0.514, _MAMF, "infinity"),
    "l4": Device(121e12, 30.3e12, 0.3e12, 24 * GIB, across="100G"),
    "l40s": Device(362e12, 91.6e12, 0.864e12, 48 * GIB, across="200G"),
    "rtx3090": Device(71e12, 35.6e12, 0.936e12, 24 * GIB, across="100G"),
    "rtx4090": Device(165e12, 82.6e12, 1.008e12, 24 * GIB, across="100G"),
}
"""presets of devices by name"""


# Per direction and device: 80 % of the nominal rate. Latencies are of the order of a small NCCL message.
LINKS: dict[str, LinkSpeed] = {
    "nvlink3": LinkSpeed(_SHARE * 300e9, 5e-6),  # A100: 600 GB/s in both directions
    "nvlink4": LinkSpeed(_SHARE * 450e9, 5e-6),  # H100, H200
    "nvlink5": LinkSpeed(_SHARE * 900e9, 5e-6),  # B200
    "infinity": LinkSpeed(_SHARE * 64e9, 5e-6),  # MI300X: 128 GB/s in both directions to each of 7 others
    "pcie": LinkSpeed(_SHARE * 32e9, 10e-6),  # generation 4, 16 lanes
    "pcie5": LinkSpeed(_SHARE * 64e9, 10e-6),
    "100G": LinkSpeed(_SHARE * 12.5e9, 15e-6),
    "200G": LinkSpeed(_SHARE * 25e9, 15e-6),
    "400G": LinkSpeed(_SHARE * 50e9, 15e-6),
    "800G": LinkSpeed(_SHARE * 100e9, 15e-6),
}
"""presets of links by name"""
_ALIASES = {"nvlink": "nvlink4", "pcie4": "pcie"}


def find_device(name: str) -> tuple[str, Device]:
    """The device of that name, and the name as in the table."""
    return find_named("device", name, {key: (key, device) for key, device in DEVICES.items()}, CostError)


def find_link(name: str) -> LinkSpeed:
    """The link of that name."""
    return find_named("link", name, LINKS, CostError, _ALIASES)


def node_cluster(
    ranks: int, within: "str | LinkSpeed", across: "str | LinkSpeed | None" = None, per_node: int = 8
) -> Cluster:
    """Ranks on nodes of `per_node` devices each, in order, with links, also by name.

    Args:
        ranks: number of pipeline ranks
        within: the link between devices of a node
        across: the link between nodes; None: as within
        per_node: devices of a node
    """
    if per_node < 1:
        raise CostError("per_node must be 1 or more", got=per_node)
    inner = find_link(within) if isinstance(within, str) else within
    if across is None or ranks <= per_node:
        return Cluster(ranks, latency=inner.latency, bandwidth=inner.bandwidth)
    outer = find_link(across) if isinstance(across, str) else across
    links = tuple(
        Link(source, target, inner.latency, inner.bandwidth)
        for source in range(ranks)
        for target in range(source // per_node * per_node, min((source // per_node + 1) * per_node, ranks))
        if source != target
    )
    return Cluster(ranks, latency=outer.latency, bandwidth=outer.bandwidth, links=links)
