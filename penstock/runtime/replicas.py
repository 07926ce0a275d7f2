"""Replicas: gradients averaged over the copies of the pipeline, each stage as soon as its last backward is through."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from penstock.runtime.groups import ProcessGroups


class Replicas:
    """Averages what one step adds to the gradients; what earlier steps left in them is added again afterwards."""

    def __init__(self, groups: ProcessGroups, parameters: Mapping[int, Sequence[nn.Parameter]]) -> None:
        self._groups = groups
        self._parameters = parameters if groups.replicas is not None else {}
        self._under_way: list[tuple[Any, Tensor, list[nn.Parameter]]] = []

    @property
    def count(self) -> int:
        """How many replicas there are."""
        return self._groups.num_replicas

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that are averaged here; sharded ones are averaged by who shards them."""
        found = (parameter for group in self._parameters.values() for parameter in group)
        return [parameter for parameter in dict.fromkeys(found) if not isinstance(parameter, DTensor)]

    def start(self, stage: int) -> None:
        """Begin to average the gradients of a stage, while other stages still compute."""
        for own in _alike(self._own(stage)):
            flat = torch.cat([*map(_flat, own), _are_there(own)])
            work = self._groups.start(dist.all_reduce, flat, group=self._groups.replicas, async_op=True)
            self._under_way.append((work, flat, own))

    def finish(self) -> None:
        """Wait for all averages and put them in place; of a parameter that two stages use the later one counts."""
        for work, flat, own in self._under_way:
            self._groups.wait(work)
            sizes = [parameter.numel() for parameter in own]
            *parts, there = torch.split(flat.div_(self._groups.num_replicas), [*sizes, len(own)])
            for parameter, part, is_there in zip(own, parts, there.tolist(), strict=True):
                # What no replica used has no gradient, as in plain training; what one of them used, all have.
                if is_there:
                    parameter.grad = part.view_as(parameter).clone()
        self._under_way.clear()

    def forget(self) -> None:
        """Let go of averages that a step which failed has begun."""
        self._under_way.clear()

    def sum(self, figures: Tensor) -> Tensor:
        """Figures summed over the replicas."""
        if self._groups.replica_control is None:
            return figures
        total = figures.cpu().clone()
        self._groups.run(dist.all_reduce, total, group=self._groups.replica_control, async_op=True)
        return total.to(figures.device)

    def _own(self, stage: int) -> list[nn.Parameter]:
        group = self._parameters.get(stage, ())
        return [p for p in group if p.requires_grad and not isinstance(p, DTensor)]


def _alike(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Those of one type together, so that none changes its type on the way."""
    dtypes = dict.fromkeys(parameter.dtype for parameter in parameters)
    return [[parameter for parameter in parameters if parameter.dtype == dtype] for dtype in dtypes]


def _are_there(parameters: list[nn.Parameter]) -> Tensor:
    """For each parameter, whether it has a gradient at all."""
    first = parameters[0]
    return torch.tensor([p.grad is not None for p in parameters], dtype=first.dtype, device=first.device)


def _flat(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter).flatten()
    return (gradient.to_dense() if gradient.is_sparse else gradient).flatten()
