"""Health: which stage first made a number that is none, NaN or infinite."""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_NONE = 1 << 20


class Health:
    """The smallest and the largest entry of all that a stage made, kept on the device until the step is over."""

    def __init__(self) -> None:
        self._extremes: dict[int, list[Tensor]] = {}

    def look(self, stage: int, values: Iterable[object]) -> None:
        """Note what a stage made for one microbatch."""
        found = self._extremes.setdefault(stage, [])
        for value in values:
            if isinstance(value, Tensor) and value.is_floating_point():
                found += _extremes(value.detach())

    def first_broken(self) -> int:
        """The first stage whose forward went wrong; a large number if none did."""
        broken = [stage for stage, found in self._extremes.items() if not _are_finite(found)]
        return min(broken, default=_NONE)


def last_broken(parameters: Mapping[int, Iterable[nn.Parameter]]) -> int:
    """The last stage with a broken gradient, where it came from; -1 if there is none."""
    broken = []
    for stage, own in parameters.items():
        if not are_finite(parameter.grad for parameter in own if parameter.grad is not None):
            broken.append(stage)
    return max(broken, default=-1)


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether every entry is a finite number, of what is sharded every entry of this rank's part."""
    return _are_finite([extreme for tensor in tensors for extreme in _extremes(_local(tensor))])


def severity(values: Iterable[object]) -> int:
    """2 if any entry is NaN or positive infinity, 1 if one is negative infinity, as masks have it; else 0."""
    worst = 0
    for value in values:
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
            for extreme in _extremes(_local(value.detach())):
                number = float(extreme)
                worst = max(worst, 0 if math.isfinite(number) else 1 if number < 0 else 2)
    return worst


def is_stage(number: float) -> bool:
    """Whether a figure names a stage at all."""
    return 0 <= number < _NONE


def _extremes(tensor: Tensor) -> Sequence[Tensor]:
    """Where any entry is NaN, both are; on the host this is many times faster than a norm or asking every entry."""
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return torch.aminmax(tensor) if tensor.numel() else ()


def _are_finite(values: list[Tensor]) -> bool:
    return not values or bool(torch.stack(values).isfinite().all())


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
