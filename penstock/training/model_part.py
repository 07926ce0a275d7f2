"""ModelPart: the stages, parameters and buffers that one process has of a model."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from penstock.capture import Captured
from penstock.errors import RunError
from penstock.ir.plan import Plan
from penstock.runtime.crew import Crew
from penstock.runtime.earlier import Earlier
from penstock.runtime.replicas import Replicas
from penstock.runtime.shards import Shards
from penstock.runtime.tied import Tied
from penstock.split import Stage
from penstock.training.belongings import (
    check_alike,
    check_model,
    check_replicas,
    own_parameters,
    shared_parameters,
)
from penstock.training.state import check_state, spread

Parallelize = Callable[[nn.Module], Any]


class ModelPart:
    """What this process has, and how its gradients become those of the whole pipeline and all its replicas."""

    def __init__(
        self, model: nn.Module, plan: Plan, crew: Crew, parallelize: Parallelize | None = None, restores: bool = True
    ) -> None:
        """`restores`: whether a step that fails leaves the gradients of earlier ones as they were."""
        check_model(plan, model)
        if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            raise RunError(
                "the model has no numbers: it is on the meta device",
                hint="plan with it, and give the Pipeline the model with its weights",
            )
        self.crew = crew
        self.captured = Captured.planned(model, plan.graph)
        ranks = range(plan.num_ranks) if crew.is_alone else (crew.rank,)
        placement = plan.schedule.placement
        own = (index for index in range(plan.num_stages) if placement[index] in ranks)
        self.stages = {index: Stage(self.captured, plan.partition, index) for index in own}
        check_replicas(crew, self.stages)
        for index, stage in self.stages.items():
            stage.recomputes = plan.choices.recompute[index]
            if parallelize is not None:
                parallelize(stage)
        self.shards = Shards(self.stages)
        self.captured.surroundings = self.shards.gathered
        self.replicas = Replicas(crew, {index: list(stage.parameters()) for index, stage in self.stages.items()})
        self.tied = Tied(crew, shared_parameters(plan, self.stages, crew.rank))
        check_alike(plan, self.tied, crew)
        apart = (*self.replicas.parameters, *self.tied.parameters)
        self._earlier = Earlier(apart, self.parameters.values(), restores)

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
        """The step has failed: gradients are what they were before."""
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
        return {name: tensor for stage in self.stages.values() for name, tensor in stage.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the numbers of these names; nothing is changed unless all of them fit."""
        whole = set(self.captured.model.state_dict())
        check_state(state, self.state_dict(), whole)
        for stage in self.stages.values():
            own = stage.state_dict()
            stage.load_state_dict({name: spread(state[name], tensor) for name, tensor in own.items()})
