"""Replicas: gradients averaged over the copies of the pipeline, each stage as soon as its last backward is through."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from penstock.runtime.crew import Crew


class Replicas:
    """Averages what one step adds to the gradients; what earlier steps left in them is added again afterwards."""

    def __init__(self, crew: Crew, parameters: Mapping[int, Sequence[nn.Parameter]]) -> None:
        self._crew = crew
        self._parameters = parameters if crew.replicas is not None else {}
        self._under_way: dict[int, tuple[Any, Tensor]] = {}

    @property
    def count(self) -> int:
        """How many replicas there are."""
        return self._crew.num_replicas

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that are averaged here; sharded ones are averaged by who shards them."""
        found = (parameter for group in self._parameters.values() for parameter in group)
        return [parameter for parameter in dict.fromkeys(found) if not isinstance(parameter, DTensor)]

    def start(self, stage: int) -> None:
        """Begin to average the gradients of a stage, while other stages still compute."""
        own = self._own(stage)
        if own:
            flat = torch.cat([_flat(parameter) for parameter in own])
            work = dist.all_reduce(flat, group=self._crew.replicas, async_op=True)
            self._under_way[stage] = (work, flat)

    def finish(self) -> None:
        """Wait for all averages and put them in place."""
        for stage, (work, flat) in self._under_way.items():
            work.wait()
            own = self._own(stage)
            parts = torch.split(flat.div_(self._crew.num_replicas), [parameter.numel() for parameter in own])
            for parameter, part in zip(own, parts, strict=True):
                # No replica used it: it has no gradient, as in plain training.
                if parameter.grad is not None or bool(part.any()):
                    parameter.grad = part.view_as(parameter).clone()
        self._under_way.clear()

    def sum(self, figures: Tensor) -> Tensor:
        """Figures summed over the replicas."""
        if self._crew.replicas is not None:
            device = "cuda" if dist.get_backend(self._crew.replicas) == "nccl" else "cpu"
            moved = figures.to(device)
            dist.all_reduce(moved, group=self._crew.replicas)
            return moved.to(figures.device)
        return figures

    def _own(self, stage: int) -> list[nn.Parameter]:
        group = self._parameters.get(stage, ())
        return [p for p in group if p.requires_grad and not isinstance(p, DTensor)]


def _flat(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    return torch.zeros_like(parameter).flatten() if gradient is None else gradient.flatten()
