"""Health: which stage first made a number that is none, NaN or infinite."""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

_NONE = 1 << 20


class Health:
    """The largest entry of all that a stage made, kept on the device until the step is over."""

    def __init__(self) -> None:
        self._largest: dict[int, list[Tensor]] = {}

    def look(self, stage: int, values: Iterable[object]) -> None:
        """Note what a stage made for one microbatch; NaN is larger than anything."""
        for value in values:
            if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
                self._largest.setdefault(stage, []).append(torch.linalg.vector_norm(value.detach(), math.inf))

    def first_broken(self) -> int:
        """The first stage whose forward went wrong; a large number if none did."""
        broken = [stage for stage, found in self._largest.items() if not _are_finite(found)]
        return min(broken, default=_NONE)


def last_broken(parameters: Mapping[int, Iterable[nn.Parameter]]) -> int:
    """The last stage with a broken gradient, where it came from; -1 if there is none."""
    broken = []
    for stage, own in parameters.items():
        gradients = [_local(parameter.grad) for parameter in own if parameter.grad is not None]
        if not _are_finite([get_total_norm(gradients, math.inf)]):
            broken.append(stage)
    return max(broken, default=-1)


def is_stage(number: float) -> bool:
    """Whether a figure names a stage at all."""
    return 0 <= number < _NONE


def _are_finite(values: list[Tensor]) -> bool:
    return bool(torch.stack(values).isfinite().all())


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
