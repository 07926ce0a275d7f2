"""The part of a model that one process holds: its stages, parameters and buffers."""

from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.capture import (
    Captured,
    Granularity,
    LruCache,
    Recording,
    describe_model,
    describe_recording,
    dtype_name,
    internal_call,
)
from penstock.errors import PlanError, RunError
from penstock.ir import Plan
from penstock.runtime.fsdp import FsdpStages
from penstock.runtime.gradients import ReplicaReducer, TiedParameter, TiedReducer
from penstock.runtime.groups import ProcessGroups
from penstock.runtime.initial_weights import check_replica_weights, check_tied_weights, differing_weights
from penstock.runtime.meta_init import is_meta, materialize
from penstock.runtime.row_parameters import RowParameters
from penstock.runtime.tensor_parallel import (
    PartialGradients,
    distribute_like,
    find_layouts,
    replicas_share_parameters,
)
from penstock.stages import PartitionedModel, Stage, parameter_ranks

_STATE_HINT = "the state dict of the whole model, or of this rank"
Parallelize = Callable[[nn.Module], Any]
BufferName = tuple[nn.Module, str]
"""a module, and the name of one of its buffers"""
LOSS_FN = "loss_fn"
"""the parameters of a loss module have names that begin with this, and with more underscores if the model has it"""


class ModelPart:
    """The stages of this process, with the reducers that sum their gradients over ranks and replicas."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        groups: ProcessGroups,
        parallelize: Parallelize | None,
        granularity: Granularity,
        loss_module: nn.Module | None,
        checks_model: bool,
    ) -> None:
        """`parallelize` is applied to every stage. The last stage trains the parameters of `loss_module`.

        `checks_model`: ranks compare the code, constants and weights of their models.
        """
        _check_model(plan, model)
        self._shared_names = _shared_names(model)
        self.groups = groups
        checks_model = checks_model and not groups.is_local
        self._description = describe_model(model, Granularity.of(plan.graph).opened) if checks_model else ()
        # parallelize_fn changes the modules of this rank's stages only, which other ranks record unchanged.
        self._describes_recordings = checks_model and parallelize is None
        self._recording_descriptions: LruCache[Recording, tuple[str, ...]] = LruCache()
        self.captured = Captured.planned(model, plan.graph, granularity)
        self.stages = self._make_stages(plan)
        self.has_weights = not is_meta(model)
        """False until weights are loaded into a model that was on the meta device"""
        self.weights_error = differing_weights(plan, model, groups) if checks_model else None
        """the error for weights that differ between ranks, until weights are loaded"""
        if not self.has_weights:
            materialize(model, self._named_parameters().keys(), torch.get_default_device())
            self.stages = self._make_stages(plan)
        own_loss = self._own_loss_module(loss_module)
        self.loss_state = frozenset(own_loss.state_dict())
        """names of the parameters and buffers of the loss module, on every rank"""
        self._parallelize(parallelize, own_loss, plan.num_stages - 1)
        self.fsdp = FsdpStages(self.stages)
        # Recording runs the model as a whole, which needs whole parameters.
        self.captured.recording_context = self.fsdp.gathered
        self.layouts = find_layouts(groups, list(self.stages.values()), self.has_weights, plan.graph.tied)
        """how each parameter is sharded over the ranks with the same stages"""
        self.replicas_share_parameters = replicas_share_parameters(groups, self.layouts)
        """whether replicas share parameters, so that they must record the model together"""
        by_stage = {index: list(stage.parameters()) for index, stage in self.stages.items()}
        self.replicas = ReplicaReducer(groups, by_stage, self.layouts)
        self.tied = TiedReducer(groups, self._tied_parameters(plan))
        self.rows = RowParameters(groups, plan, model, self._named_parameters())
        for row in self.rows.replaced.values():
            self.layouts.setdefault(row.whole, self.layouts[row.rows])
        reducers = (self.replicas, PartialGradients(groups, self.layouts), self.tied, self.rows)
        self.reducers = [reducer for reducer in reducers if reducer.parameters]
        """those with gradients to reduce, in the order in which they run after the last backward"""
        if self.has_weights:
            check_tied_weights(plan, self.tied, groups)

    def _make_stages(self, plan: Plan) -> dict[int, Stage]:
        placement = plan.schedule.placement
        indices = (index for index in range(plan.num_stages) if placement[index] in self.groups.own_ranks)
        partitioned, recomputes = PartitionedModel(self.captured, plan.partition), plan.choices.recompute
        return {index: Stage(partitioned, index, recomputes[index]) for index in indices}

    def _own_loss_module(self, loss_module: nn.Module | None) -> nn.Module:
        """A module with the loss module as its child `loss_fn`, without parameters that are the model's.

        Empty if the loss module has no parameters of its own.
        """
        container, model = nn.Module(), self.captured.model
        shared = {id(parameter) for parameter in model.parameters()}
        if loss_module is not None and any(id(parameter) not in shared for parameter in loss_module.parameters()):
            name = LOSS_FN
            while hasattr(model, name):
                name += "_"
            container.add_module(name, _without_parameters(loss_module, shared))
        return container

    def _parallelize(self, parallelize: Parallelize | None, own_loss: nn.Module, last_stage: int) -> None:
        """Apply `parallelize` to every stage, and add the loss module to the last one; weights are compared before."""
        losses = [own_loss] if last_stage in self.stages else []
        if self.has_weights:
            check_replica_weights(self.groups, (*self.stages.values(), *losses))
        if parallelize is not None:
            for stage in self.stages.values():
                parallelize(stage)
        for loss in losses:
            # After `parallelize`: the loss module is not called in the forward of the stage that FSDP would wrap.
            for name, module in loss.named_children():
                self.stages[last_stage].add_module(name, module)

    def _named_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of all stages, tied ones under each of their names."""
        stages = self.stages.values()
        return {name: p for stage in stages for name, p in stage.named_parameters(remove_duplicate=False)}

    def _tied_parameters(self, plan: Plan) -> list[TiedParameter]:
        """The parameters of this rank that other ranks use too, in the order of the graph."""
        parameters = {plan.graph.tensor_of(name): parameter for name, parameter in self._named_parameters().items()}
        users = parameter_ranks(plan).items()
        tied = [(name, sorted(ranks)) for name, ranks in users if len(ranks) > 1 and self.groups.rank in ranks]
        return [TiedParameter(name, parameters[name], tuple(ranks)) for name, ranks in tied]

    @property
    def tied_names(self) -> tuple[tuple[str, ...], ...]:
        """The groups of names that are one parameter in the unsplit model."""
        groups = list(dict.fromkeys(row.names for row in self.rows.slices.values() if len(row.names) > 1))
        named = {name for group in groups for name in group}
        return (*(group for group in self.captured.graph.tied if not named & set(group)), *groups)

    @property
    def device(self) -> torch.device:
        """The device of the stages."""
        tensors = (t for stage in self.stages.values() for t in (*stage.parameters(), *stage.buffers()))
        return next((tensor.device for tensor in tensors), torch.device("cpu"))

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters by their original names, tied ones once, under their first name."""
        by_id: dict[int, tuple[str, nn.Parameter]] = {}
        replaced = self.rows.replaced
        for stage in self.stages.values():
            for name, parameter in stage.named_parameters(remove_duplicate=False):
                if id(parameter) in replaced:
                    row = replaced[id(parameter)]
                    name, parameter = row.slice.whole, row.whole
                by_id.setdefault(id(parameter), (name, parameter))
        return dict(by_id.values())

    @property
    def written_buffers(self) -> list[BufferName]:
        """The buffers that the forward of these stages writes, such as the running means of a batch norm."""
        written = {name for update in self.captured.graph.updates for name in update.names}
        buffers = []
        for stage in self.stages.values():
            for full_name, _ in stage.named_buffers(remove_duplicate=False):
                if full_name in written:
                    path, _, name = full_name.rpartition(".")
                    buffers.append((stage.get_submodule(path), name))
        return buffers

    @property
    def remote_parameters(self) -> dict[int, str]:
        """The names of the model's parameters that other ranks train, by the id of this process's copy."""
        local = {id(parameter) for stage in self.stages.values() for parameter in stage.parameters()}
        return {id(p): name for name, p in self.captured.model.named_parameters() if id(p) not in local}

    def gradients(self) -> list[Tensor]:
        """The gradients of this process."""
        return [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]

    def owned_gradients(self) -> tuple[list[Tensor], list[int]]:
        """The gradients of parameters that this rank owns, and how many ranks have the same shard of each."""
        skipped = self.tied.not_owned | self.rows.not_owned
        owned = [p for p in self.parameters.values() if p.grad is not None and id(p) not in skipped]
        return [p.grad for p in owned], [self.layouts[p].copies for p in owned]

    def describe(self, recordings: Iterable[Recording]) -> list[str]:
        """The lines about the model and its recordings that must be equal on all ranks of the pipeline."""
        lines = [*self._description]
        if self._describes_recordings:
            for recording in dict.fromkeys(recordings):
                lines += self._recording_descriptions.get_or_make(recording, partial(describe_recording, recording))
        return lines

    def check_weights(self) -> None:
        """Raise an error if the weights have not been loaded yet, or differ between ranks."""
        if self.weights_error is not None:
            raise self.weights_error
        if not self.has_weights:
            raise RunError(
                "the model was on the meta device and its weights are not loaded yet",
                hint="pipe.load(directory), where save_pretrained wrote, or pipe.load_state_dict(state)",
            )

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers by their original names; of a split output layer the rows that this process has."""
        self.check_weights()
        state = self.own_state()
        for row in self.rows.replaced.values():
            if row.whole is not None:
                state.setdefault(row.slice.whole, row.whole.detach())
        return self.rows.join(state)

    def own_state(self) -> dict[str, Tensor]:
        """Parameters and buffers by their original names, also before the weights are loaded."""
        return {name: tensor for stage in self.stages.values() for name, tensor in stage.state_dict().items()}

    def with_shared_names(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A state with each of its tensors under all names that the tensor has in the unsplit model.

        A stage has the names that its blocks use, so that one which no block uses would be missing. Every name has
        memory of its own, because safetensors refuses to write tensors that share it.
        """
        named = dict(state)
        for names in self._shared_names:
            found = next((state[name] for name in names if name in state), None)
            if found is not None:
                named |= {name: found.clone() for name in names if name not in state}
        return named

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the tensors of this process; nothing is changed unless all of them fit."""
        if isinstance(state, Mapping) and not self.loss_state & state.keys():
            # The state dict of the model alone: the loss module keeps its state.
            state = {**state, **{name: tensor for name, tensor in self.own_state().items() if name in self.loss_state}}
        with internal_call():
            whole = {*self.captured.model.state_dict(), *self.loss_state}
        if isinstance(state, Mapping):
            state = self.rows.split(state, whole)
        _check_state_dict(state, self.own_state(), whole)
        for stage in self.stages.values():
            tensors = stage.state_dict()
            stage.load_state_dict({name: distribute_like(state[name], tensor) for name, tensor in tensors.items()})
        self.has_weights, self.weights_error = True, None


def _shared_names(model: nn.Module) -> list[list[str]]:
    """The names of every parameter and buffer that the state dict of the model has under several names."""
    with internal_call():
        state = model.state_dict(keep_vars=True)
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    return [same for same in names.values() if len(same) > 1]


def _check_state_dict(state: Any, expected: Mapping[str, Tensor], model_names: set[str]) -> None:
    """Refuse a state dict that lacks a name of `expected`, or has an unknown name, another shape or a meta tensor."""
    if not isinstance(state, Mapping):
        raise RunError("a state dict must map names to tensors", got=type(state).__name__, hint=_STATE_HINT)
    missing = [name for name in expected if name not in state]
    if missing:
        raise RunError(
            "a state dict must have all parameters and buffers",
            missing=len(missing),
            first=missing[0],
            hint=_STATE_HINT,
        )
    for name, value in state.items():
        if name not in model_names and name not in expected:
            close = get_close_matches(str(name), model_names, n=1)
            hint = f"{close[0]!r}" if close else _STATE_HINT
            raise RunError("a state dict must have names of the model only", name=repr(name), hint=hint)
        if name not in expected:
            continue
        if not isinstance(value, Tensor):
            raise RunError(
                "a state dict must map names to tensors", name=name, got=type(value).__name__, hint=_STATE_HINT
            )
        if value.shape != expected[name].shape:
            problem = "a tensor must have the shape that it has in the model"
            raise RunError(problem, name=name, got=list(value.shape), model=list(expected[name].shape))
        if value.is_meta:
            raise RunError("a tensor of a state dict must not be on the meta device", name=name)


def _without_parameters(module: nn.Module, shared: Collection[int]) -> nn.Module:
    """The module itself if it has none of these parameters, by id; else a module with all of its other state."""
    if not any(id(parameter) in shared for parameter in module.parameters()):
        return module
    rest = nn.Module()
    for name, parameter in module._parameters.items():
        if id(parameter) not in shared:
            rest.register_parameter(name, parameter)
    for name, buffer in module._buffers.items():
        rest.register_buffer(name, buffer, persistent=name not in module._non_persistent_buffers_set)
    for name, child in module.named_children():
        rest.add_module(name, _without_parameters(child, shared))
    return rest


def _check_model(plan: Plan, model: nn.Module) -> None:
    """Raise an error if the model's parameters are not those of the plan."""
    parameters = model.named_parameters(remove_duplicate=False)
    given = {name: f"{dtype_name(p.dtype)}{list(p.shape)}" for name, p in parameters}
    planned = {value.name: f"{value.spec.dtype}{list(value.spec.shape)}" for value in plan.graph.parameters}
    for name in (*planned, *given):
        if planned.get(name) != given.get(name):
            missing = "no parameter of this name"
            raise PlanError(
                "the plan is for another model",
                name=name,
                planned=planned.get(name, missing),
                model=given.get(name, missing),
                hint="plan this model",
            )
