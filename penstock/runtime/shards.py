"""Shards: stages whose parameters are spread over the replicas, gathered when the program says so."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


class Shards:
    """What `fully_shard` made of stages: gathers and lets go of parameters, and reduces gradients once per step."""

    def __init__(self, stages: Mapping[int, nn.Module]) -> None:
        self._parts = {
            index: [module for module in stage.modules() if isinstance(module, FSDPModule)]
            for index, stage in stages.items()
        }
        self._left: dict[int, int] = {}

    @property
    def are_there(self) -> bool:
        """Whether any stage is sharded."""
        return any(self._parts.values())

    def has(self, stage: int) -> bool:
        """Whether a stage is sharded."""
        return bool(self._parts.get(stage))

    def begin(self, num_microbatches: int) -> None:
        """A step begins: nothing is gathered, and gradients stay here until the last microbatch."""
        for stage, parts in self._parts.items():
            self._left[stage] = num_microbatches
            for part in parts:
                _set_last(part, False)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """All parameters are whole inside."""
        for stage in self._parts:
            self.unshard(stage)
        try:
            yield
        finally:
            for stage in self._parts:
                self.reshard(stage)

    def before_backward(self, stage: int) -> None:
        """One more backward of a stage: with the last one its gradients are reduced over the replicas."""
        self._left[stage] = self._left.get(stage, 0) - 1
        if not self._left[stage]:
            for part in self._parts.get(stage, ()):
                _set_last(part, True)

    def forget(self) -> None:
        """Let go of what a step that failed has left: gathered parameters, and gradients that were not reduced."""
        for parts in self._parts.values():
            for part in parts:
                for parameter in part.parameters():
                    if not isinstance(parameter, DTensor):
                        parameter.grad = None
                part.reshard()

    def unshard(self, stage: int) -> None:
        """Gather the parameters of a stage."""
        for part in self._parts.get(stage, ()):
            part.unshard()

    def reshard(self, stage: int) -> None:
        """Keep only this rank's share of a stage's parameters."""
        for part in self._parts.get(stage, ()):
            part.reshard()


def _set_last(part: FSDPModule, is_last: bool) -> None:
    part.set_requires_gradient_sync(is_last, recurse=False)
    part.set_is_last_backward(is_last)
    part.set_reshard_after_backward(is_last, recurse=False)
