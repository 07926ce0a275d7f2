"""FSDP inside stages, if `parallelize_fn` applies `fully_shard`: when parameters are gathered and gradients reduced."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

from penstock.capture import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule, UnshardHandle


def is_fsdp_module(module: nn.Module) -> bool:
    """Whether `fully_shard` was applied to a module itself."""
    # Not imported here, as in `is_dtensor`: a process in which nobody has imported it has no such module.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return isinstance(module, getattr(fsdp, "FSDPModule", ()))


class FsdpStages:
    """The modules of FSDP in the stages of one process."""

    def __init__(self, stages: Mapping[int, nn.Module]) -> None:
        modules = {i: [m for m in stage.modules() if is_fsdp_module(m)] for i, stage in stages.items()}
        self.modules = {index: sharded for index, sharded in modules.items() if sharded}
        """by stage; empty if no stage uses FSDP"""
        self._num_left: dict[int, int] = {}
        """backwards that each stage still has to run in this step"""
        self._gathers: dict[int, list[UnshardHandle]] = {}
        """by stage, the gathers that no pass has waited for yet"""

    def begin_step(self, num_microbatches: int) -> None:
        """Keep gradients local until the last microbatch, and parameters gathered until the program reshards them.

        If forwards resharded them, each backward would gather them again, which would never end if another replica has
        fewer microbatches.
        """
        for stage, modules in self.modules.items():
            self._num_left[stage] = num_microbatches
            for module in modules:
                _set_last_backward(module, False)
                module.set_reshard_after_forward(False, recurse=False)

    def begin_evaluation(self) -> None:
        """Let every forward reshard: the program of an evaluation has no actions for it."""
        for modules in self.modules.values():
            for module in modules:
                module.set_reshard_after_forward(True, recurse=False)

    def before_backward(self, stage: int) -> None:
        """Wait for the parameters; make the last backward of a stage reduce its gradients over the replicas."""
        self.wait(stage)
        self._num_left[stage] = self._num_left.get(stage, 0) - 1
        if not self._num_left[stage]:
            for module in self.modules[stage]:
                _set_last_backward(module, True)

    def clear(self) -> None:
        """Drop the gathered parameters and unreduced gradients of a failed step."""
        # Pending gathers are not waited for: another replica may have failed before it started them.
        for modules in self.modules.values():
            for module in modules:
                for parameter in module.parameters():
                    if not is_dtensor(parameter):
                        parameter.grad = None
                module.reshard()

    def unshard(self, stage: int) -> None:
        """Start gathering the parameters of a stage, while other stages compute; every pass waits for them."""
        if stage in self._gathers:
            # Left by a failed step; the weights may have changed since. This wait ends, because there is a next step
            # only if all replicas have failed in the same one.
            self.reshard(stage)
        handles = [module.unshard(async_op=True) for module in self.modules.get(stage, ())]
        self._gathers[stage] = [handle for handle in handles if handle is not None]

    def wait(self, stage: int) -> None:
        """Wait until the parameters of a stage are gathered."""
        for handle in self._gathers.pop(stage, ()):
            handle.wait()

    def reshard(self, stage: int) -> None:
        """Keep only this rank's shard of the parameters of a stage."""
        self.wait(stage)
        for module in self.modules.get(stage, ()):
            module.reshard()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Gather the parameters of all stages inside the context."""
        for stage in self.modules:
            self.unshard(stage)
        for stage in self.modules:
            self.wait(stage)
        try:
            yield
        finally:
            for stage in self.modules:
                self.reshard(stage)


def _set_last_backward(module: "FSDPModule", is_last: bool) -> None:
    module.set_requires_gradient_sync(is_last, recurse=False)
    module.set_is_last_backward(is_last)
    module.set_reshard_after_backward(is_last, recurse=False)


def averaged_by_fsdp(stages: Iterable[nn.Module]) -> dict[nn.Parameter, tuple[set[int], float]]:
    """The parameters whose gradients FSDP reduces: over which ranks, and by what it divides the sum."""
    averaged: dict[nn.Parameter, tuple[set[int], float]] = {}
    for stage in stages:
        for module in stage.modules():
            if not is_fsdp_module(module):
                continue
            # FSDP has no public query for the mesh that a module was given.
            for group in module._get_fsdp_state()._fsdp_param_groups:
                ranks = set(group.mesh_info.mesh.mesh.flatten().tolist())
                factor = group.gradient_divide_factor or len(ranks)
                for managed in group.fsdp_params:
                    averaged[managed.sharded_param] = ranks, factor
    return averaged
