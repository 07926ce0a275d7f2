"""ModelPart: the stages, parameters and buffers that one process has of a model."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from penstock.capture import Captured
from penstock.errors import RunError
from penstock.ir import Plan
from penstock.runtime.belongings import (
    check_alike,
    check_model,
    check_replicas,
    own_parameters,
    shared_parameters,
    written_buffers,
)
from penstock.runtime.earlier import Earlier
from penstock.runtime.groups import ProcessGroups
from penstock.runtime.meta_init import is_meta, materialize
from penstock.runtime.replicas import Replicas
from penstock.runtime.shards import Shards
from penstock.runtime.state_dict import check_state_dict, shard_like
from penstock.runtime.tied import Tied
from penstock.stages import Stage

Parallelize = Callable[[nn.Module], Any]


class ModelPart:
    """What this process has, and how its gradients become those of the whole pipeline and all its replicas."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        groups: ProcessGroups,
        parallelize: Parallelize | None = None,
        restores: bool = True,
    ) -> None:
        """`restores`: whether a step that fails leaves the gradients of earlier ones as they were."""
        check_model(plan, model)
        self.groups = groups
        self.captured = Captured.planned(model, plan.graph)
        self.stages = self._cut(plan)
        self.has_numbers = not is_meta(model)
        """whether there is anything to compute with: a model on the meta device must be loaded first"""
        if not self.has_numbers:
            materialize(model, _names(self.stages), torch.get_default_device())
            self.stages = self._cut(plan)
        else:
            check_replicas(groups, self.stages)
        for index, stage in self.stages.items():
            stage.recomputes = plan.choices.recompute[index]
            if parallelize is not None:
                parallelize(stage)
        self.shards = Shards(self.stages)
        self.captured.recording_context = self.shards.gathered
        self.replicas = Replicas(groups, {index: list(stage.parameters()) for index, stage in self.stages.items()})
        self.tied = Tied(groups, shared_parameters(plan, self.stages, groups.rank))
        if self.has_numbers:
            check_alike(plan, self.tied, groups)
        apart = (*self.replicas.parameters, *self.tied.parameters)
        places = written_buffers(self.captured.graph, self.stages.values())
        self._earlier = Earlier(apart, self.parameters.values(), restores, places)

    def _cut(self, plan: Plan) -> dict[int, Stage]:
        """The stages of this process."""
        ranks = range(plan.num_ranks) if self.groups.is_local else (self.groups.rank,)
        placement = plan.schedule.placement
        own = (index for index in range(plan.num_stages) if placement[index] in ranks)
        return {index: Stage(self.captured, plan.partition, index) for index in own}

    @property
    def device(self) -> torch.device:
        """Where the stages compute."""
        tensors = (t for stage in self.stages.values() for t in (*stage.parameters(), *stage.buffers()))
        return next((tensor.device for tensor in tensors), torch.device("cpu"))

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters by their original names, tied ones once."""
        return own_parameters(self.stages)

    @property
    def elsewhere(self) -> dict[int, str]:
        """The names of the model's parameters that are on other ranks, by the identity of what this process has."""
        own = {id(parameter) for stage in self.stages.values() for parameter in stage.parameters()}
        return {id(p): name for name, p in self.captured.model.named_parameters() if id(p) not in own}

    def check_numbers(self) -> None:
        """Refuse to compute before there are numbers."""
        if not self.has_numbers:
            raise RunError(
                "the model was on the meta device and has no numbers yet",
                hint="pipe.load(directory), where save_pretrained wrote, or pipe.load_state_dict(state)",
            )

    def begin(self, num_microbatches: int) -> None:
        """A step begins: what it adds to the gradients is told apart from what is there."""
        self._earlier.begin()
        self.shards.begin(num_microbatches)

    def finish(self) -> None:
        """All passes are through: what the step added is summed over those who share a parameter."""
        self.replicas.finish()
        self.tied.finish()

    def settle(self) -> None:
        """The step has succeeded: what was there before is added again."""
        self._earlier.add()

    def restore(self) -> None:
        """The step has failed: gradients and buffers are what they were before."""
        self.replicas.forget()
        self.shards.forget()
        self._earlier.restore()

    def gradients(self, counted: bool = False) -> list[Tensor]:
        """The gradients of this process; `counted`: only those that no other rank counts."""
        borrowed = self.tied.borrowed if counted else set()
        found = (parameter for parameter in self.parameters.values() if id(parameter) not in borrowed)
        return [parameter.grad for parameter in found if parameter.grad is not None]

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers by their original names."""
        self.check_numbers()
        return self.own_state()

    def own_state(self) -> dict[str, Tensor]:
        """Parameters and buffers by their original names, also before there are weights."""
        return {name: tensor for stage in self.stages.values() for name, tensor in stage.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the numbers of these names; nothing is changed unless all of them fit."""
        whole = set(self.captured.model.state_dict())
        check_state_dict(state, self.own_state(), whole)
        for stage in self.stages.values():
            own = stage.state_dict()
            stage.load_state_dict({name: shard_like(state[name], tensor) for name, tensor in own.items()})
        self.has_numbers = True


def _names(stages: Mapping[int, Stage]) -> set[str]:
    """All names of the parameters of some stages."""
    found: set[str] = set()
    for stage in stages.values():
        found.update(name for name, _ in stage.named_parameters(remove_duplicate=False))
    return found
