"""The part of a model that one process holds: its stages, parameters and buffers."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from penstock.capture import Captured
from penstock.errors import PlanError, RunError
from penstock.ir import Graph, Plan
from penstock.runtime.gradients import ReplicaReducer, ShardedStages, TiedParameter, TiedReducer
from penstock.runtime.groups import ProcessGroups
from penstock.runtime.meta_init import is_meta, materialize
from penstock.runtime.snapshot import BufferName, StepSnapshot
from penstock.runtime.state_dict import check_state_dict, shard_like
from penstock.runtime.sync import checksum
from penstock.stages import Stage

Parallelize = Callable[[nn.Module], Any]
_NUM_SAMPLED = 1024
"""entries of each parameter that replicas compare"""
_SAME_START = "use the same seed on every rank before creating the model, or load the same state on every rank"


class ModelPart:
    """The stages of this process, and how their gradients become those of all ranks and replicas."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        groups: ProcessGroups,
        parallelize: Parallelize | None = None,
        restores: bool = True,
    ) -> None:
        """`parallelize` is applied to every stage. `restores`: whether a failed step restores earlier gradients."""
        _check_model(plan, model)
        self.groups = groups
        self.captured = Captured.planned(model, plan.graph)
        self.stages = self._make_stages(plan)
        self.has_weights = not is_meta(model)
        """False until weights are loaded into a model that was on the meta device"""
        if not self.has_weights:
            names = {name for stage in self.stages.values() for name, _ in _named_parameters(stage)}
            materialize(model, names, torch.get_default_device())
            self.stages = self._make_stages(plan)
        else:
            _check_replicas(groups, self.stages)
        for index, stage in self.stages.items():
            stage.recomputes = plan.choices.recompute[index]
            if parallelize is not None:
                parallelize(stage)
        self.sharded = ShardedStages(self.stages)
        # Recording runs the model as a whole, which needs whole parameters.
        self.captured.recording_context = self.sharded.gathered
        self.replicas = ReplicaReducer(
            groups, {index: list(stage.parameters()) for index, stage in self.stages.items()}
        )
        self.tied = TiedReducer(groups, self._tied_parameters(plan))
        if self.has_weights:
            check_tied_weights(plan, self.tied, groups)
        self.snapshot = StepSnapshot(
            (*self.replicas.parameters, *self.tied.parameters),
            self.parameters.values(),
            restores,
            _written_buffers(self.captured.graph, self.stages.values()),
        )

    def _make_stages(self, plan: Plan) -> dict[int, Stage]:
        placement = plan.schedule.placement
        ranks = range(plan.num_ranks) if self.groups.is_local else (self.groups.rank,)
        own = (index for index in range(plan.num_stages) if placement[index] in ranks)
        return {index: Stage(self.captured, plan.partition, index) for index in own}

    def _tied_parameters(self, plan: Plan) -> list[TiedParameter]:
        """The parameters of this rank that other ranks use too, in the order of the graph."""
        pairs = [pair for stage in self.stages.values() for pair in _named_parameters(stage)]
        own = {plan.graph.tensor_of(name): parameter for name, parameter in pairs}
        users = parameter_ranks(plan).items()
        tied = [(name, sorted(ranks)) for name, ranks in users if len(ranks) > 1 and self.groups.rank in ranks]
        return [TiedParameter(name, own[name], tuple(ranks)) for name, ranks in tied]

    @property
    def device(self) -> torch.device:
        """The device of the stages."""
        tensors = (t for stage in self.stages.values() for t in (*stage.parameters(), *stage.buffers()))
        return next((tensor.device for tensor in tensors), torch.device("cpu"))

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters by their original names, tied ones once, under their first name."""
        found: dict[int, tuple[str, nn.Parameter]] = {}
        for stage in self.stages.values():
            for name, parameter in _named_parameters(stage):
                found.setdefault(id(parameter), (name, parameter))
        return dict(found.values())

    @property
    def remote_parameters(self) -> dict[int, str]:
        """The names of the model's parameters that other ranks train, by the id of this process's copy."""
        own = {id(parameter) for stage in self.stages.values() for parameter in stage.parameters()}
        return {id(p): name for name, p in self.captured.model.named_parameters() if id(p) not in own}

    def gradients(self, owned: bool = False) -> list[Tensor]:
        """The gradients of this process; with `owned`, without those that another rank counts."""
        skipped = self.tied.not_owned if owned else set()
        found = (parameter for parameter in self.parameters.values() if id(parameter) not in skipped)
        return [parameter.grad for parameter in found if parameter.grad is not None]

    def check_weights(self) -> None:
        """Raise an error if the weights have not been loaded yet."""
        if not self.has_weights:
            raise RunError(
                "the model was on the meta device and its weights are not loaded yet",
                hint="pipe.load(directory), where save_pretrained wrote, or pipe.load_state_dict(state)",
            )

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers by their original names."""
        self.check_weights()
        return self.own_state()

    def own_state(self) -> dict[str, Tensor]:
        """Parameters and buffers by their original names, also before the weights are loaded."""
        return {name: tensor for stage in self.stages.values() for name, tensor in stage.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the tensors of this process; nothing is changed unless all of them fit."""
        whole = set(self.captured.model.state_dict())
        check_state_dict(state, self.own_state(), whole)
        for stage in self.stages.values():
            own = stage.state_dict()
            stage.load_state_dict({name: shard_like(state[name], tensor) for name, tensor in own.items()})
        self.has_weights = True


def parameter_ranks(plan: Plan) -> dict[str, set[int]]:
    """The ranks that use each parameter, in the order of the graph; tied ones under their first name."""
    users: dict[str, set[int]] = {}
    for index, nodes in enumerate(plan.partition.runs(plan.graph)):
        for node in nodes:
            for name in node.parameters:
                users.setdefault(plan.graph.tensor_of(name), set()).add(plan.schedule.placement[index])
    return users


def check_tied_weights(plan: Plan, tied: TiedReducer, groups: ProcessGroups) -> None:
    """Raise an error, on every rank, if a parameter that several ranks use differs between them."""
    names = [name for name, ranks in parameter_ranks(plan).items() if len(ranks) > 1]
    if groups.is_local or not names:
        return
    own = {one.name: one.parameter for one in tied.tied if not isinstance(one.parameter, DTensor)}
    sums = torch.tensor([checksum([{name: own[name]}]) if name in own else 0 for name in names])
    for name, column in zip(names, groups.gather(sums).t().tolist(), strict=True):
        if len(set(column) - {0}) > 1:
            raise RunError(
                "a shared parameter differs between ranks",
                name=name,
                ranks=[rank for rank, number in enumerate(column) if number],
                hint=_SAME_START,
            )


def _check_replicas(groups: ProcessGroups, stages: Mapping[int, Stage]) -> None:
    """Raise an error, on every rank, if replicas start with different weights; called before they are sharded."""
    if groups.replica_control is None:
        return
    sampled = []
    for stage in stages.values():
        for name, parameter in _named_parameters(stage):
            # A few entries are enough: weights of another seed differ everywhere.
            flat = parameter.detach().reshape(-1)
            sampled.append({name: flat[:: max(1, len(flat) // _NUM_SAMPLED)]})
    # Combined over the ranks of the pipeline first, so that every rank of every replica sees the same difference.
    whole = checksum([{"ranks": groups.gather(torch.tensor([checksum(sampled)]))}])
    found = groups.gather_replicas(torch.tensor([whole])).flatten().tolist()
    if len(set(found)) > 1:
        other = next(replica for replica, number in enumerate(found) if number != found[0])
        raise RunError("the replicas start with different weights", replicas=(0, other), hint=_SAME_START)


def _check_model(plan: Plan, model: nn.Module) -> None:
    """Raise an error if the model's parameters are not those of the plan."""
    parameters = model.named_parameters(remove_duplicate=False)
    found = {name: f"{str(p.dtype).removeprefix('torch.')}{list(p.shape)}" for name, p in parameters}
    planned = {value.name: f"{value.spec.dtype}{list(value.spec.shape)}" for value in plan.graph.parameters}
    for name in (*planned, *found):
        if planned.get(name) != found.get(name):
            missing = "no parameter of this name"
            raise PlanError(
                "the plan is for another model",
                name=name,
                planned=planned.get(name, missing),
                model=found.get(name, missing),
                hint="plan this model",
            )


def _written_buffers(graph: Graph, stages: Iterable[Stage]) -> list[BufferName]:
    """The buffers that the forward of these stages writes, such as the running means of a batch norm."""
    written = {name for update in graph.updates for name in update.names}
    found = []
    for stage in stages:
        for full_name, _ in stage.named_buffers(remove_duplicate=False):
            if full_name in written:
                path, _, name = full_name.rpartition(".")
                found.append((stage.get_submodule(path), name))
    return found


def _named_parameters(stage: Stage) -> list[tuple[str, nn.Parameter]]:
    return list(stage.named_parameters(remove_duplicate=False))
