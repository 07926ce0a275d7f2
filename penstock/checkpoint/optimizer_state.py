"""Optimizer state by parameter name, so that a rank of any plan finds the state of its parameters."""

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.capture import RowSlice
from penstock.checkpoint.names import shorten
from penstock.errors import CheckpointError, DamagedError
from penstock.runtime import FindTensor, NamedTensors, decode_tree, distribute_like, encode_tree


@dataclass(frozen=True)
class OptimizerPart:
    """The state of the parameters of one stage, as a JSON document and the tensors that it refers to."""

    document: dict[str, Any]
    tensors: NamedTensors = field(default_factory=dict)


def split_optimizer_state(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    stage_of: Mapping[str, int],
    joined: Mapping[str, Mapping[str, Any]],
) -> dict[int, OptimizerPart]:
    """The state by stage. `names` maps ids of parameters to names, `stage_of` names to the stage that saves them.

    `joined` has the state of parameters of which the optimizer has rows only.

    The optimizer was checked by `check_optimizer`: parameters without a name are trained by other ranks.
    """
    parts: dict[int, OptimizerPart] = {}
    kind, states = type(optimizer).__name__, optimizer.state
    keyed: dict[Any, Any] = dict(states)  # some optimizers keep state under keys other than parameters
    others = {key: value for key, value in keyed.items() if not isinstance(key, Tensor)}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            name = names.get(id(parameter), "")
            if name not in stage_of:
                continue
            empty = OptimizerPart({"optimizer": kind, "groups": [], "parameters": {}})
            part = parts.setdefault(stage_of[name], empty)
            if name in part.document["parameters"]:
                continue  # other rows of the same parameter
            own = joined[name] if name in joined else states.get(parameter, {})
            state = encode_tree(dict(own), part.tensors, name)
            part.document["parameters"][name] = {"group": index, "state": state}
    group_options = [
        {name: value for name, value in group.items() if name not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]
    # In every part: a rank of another plan may read only one of them.
    for part in parts.values():
        part.document["groups"] = [
            encode_tree(options, part.tensors, f"group-{index}") for index, options in enumerate(group_options)
        ]
        part.document["others"] = encode_tree(others, part.tensors, "others")
    return parts


def check_optimizer(optimizer: object, names: Mapping[int, str], remote: Container[int] = ()) -> None:
    """Refuse anything but an optimizer of torch over parameters of this rank.

    `remote` are the ids of the model's parameters that other ranks train: an optimizer that was made from the whole
    model has them too, without gradients and state.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        hint = "torch.optim.AdamW(pipe.parameters())"
        raise CheckpointError("optimizer must be a torch.optim.Optimizer", got=type(optimizer).__name__, hint=hint)
    if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
        raise CheckpointError(
            "an optimizer with its own state_dict method cannot be saved by parameter name",
            got=type(optimizer).__name__,
            hint="the optimizer inside, if it is a wrapper; else extra=optimizer.state_dict()",
        )
    given = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = [p for p in given if id(p) not in names and id(p) not in remote]
    if foreign:
        raise CheckpointError(
            "the optimizer must have parameters of this pipeline only",
            foreign_parameters=len(foreign),
            hint="torch.optim.AdamW(pipe.parameters())",
        )


class _SavedState(NamedTuple):
    """The saved state of one parameter, and the options of its group; `find` reads the tensors of both."""

    state: dict[str, Any]
    options: Any
    find: FindTensor


class SavedOptimizer:
    """The optimizer state of all stages of a checkpoint."""

    def __init__(self, parts: Iterable[tuple[dict[str, Any], FindTensor]]) -> None:
        """For each part its document, and a function that reads its tensors."""
        self.kind = ""
        self._groups: list[tuple[Any, FindTensor]] = []
        self._others: list[tuple[Any, FindTensor]] = []
        self._states: dict[str, _SavedState] = {}
        """by the name of the parameter"""
        for document, find in parts:
            self.kind, groups = document["optimizer"], document["groups"]
            self._groups = self._groups or [(group, find) for group in groups]
            self._others.append((document["others"], find))
            for name, saved in document["parameters"].items():
                state, group = saved["state"], groups[saved["group"]]
                if not (isinstance(state, dict) and isinstance(group, dict)):
                    raise DamagedError("the optimizer state of a parameter cannot be read", name=name)
                self._states[name] = _SavedState(state, group, find)

    def restorer(
        self, optimizer: torch.optim.Optimizer, names: Mapping[int, str], rows: Mapping[int, RowSlice]
    ) -> Callable[[], None]:
        """Read and check the state for an optimizer; the returned function applies it.

        `rows`: by id the parameters that are rows of the named ones.
        """
        self._check(optimizer, names)
        options = [self._group_options(index, group, names) for index, group in enumerate(optimizer.param_groups)]
        states = {
            parameter: self._parameter_state(parameter, names[id(parameter)], group_options, rows.get(id(parameter)))
            for group, group_options in zip(optimizer.param_groups, options, strict=True)
            for parameter in group["params"]
            if id(parameter) in names
        }
        others = decode_tree(*self._others[0])

        def restore() -> None:
            optimizer.state.clear()
            optimizer.state.update(others)
            for parameter, state in states.items():
                if state:
                    optimizer.state[parameter] = state
            for group, group_options in zip(optimizer.param_groups, options, strict=True):
                group.update(group_options)

        return restore

    def _check(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
        if not self._states:
            hint = "load without the optimizer, and start with a new one"
            raise CheckpointError("the checkpoint has no optimizer state", hint=hint)
        if type(optimizer).__name__ != self.kind:
            raise CheckpointError(
                "the checkpoint has the state of another optimizer",
                saved=self.kind,
                got=type(optimizer).__name__,
                hint=self.kind,
            )
        given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        wanted = [names[id(parameter)] for parameter in given if id(parameter) in names]
        if missing := [name for name in wanted if name not in self._states]:
            problem = "the saved optimizer state lacks parameters of this optimizer"
            hint = "an optimizer over the parameters that were trained when it was saved, or load without the optimizer"
            raise CheckpointError(problem, missing=shorten(missing), hint=hint)
        # State under keys other than parameters must be the same on all ranks: it cannot be assigned to a rank of
        # another plan by name.
        if any(others != self._others[0][0] for others, _ in self._others):
            raise CheckpointError(
                "optimizer state that belongs to no parameter differed between ranks",
                hint="load without the optimizer",
            )

    def _group_options(self, index: int, group: dict[str, Any], names: Mapping[int, str]) -> dict[str, Any]:
        """The options of a group, from the groups in which its parameters were saved."""
        saved = [self._states[names[id(each)]] for each in group["params"] if id(each) in names]
        if any(each.options != saved[0].options for each in saved):
            raise CheckpointError(
                "parameters of one group were saved in groups with different options",
                group=index,
                hint="the groups that the optimizer had when it was saved",
            )
        # A group without parameters on this rank still has a learning rate, which a scheduler reads.
        if saved:
            _, options, find = saved[0]
        elif index < len(self._groups):
            options, find = self._groups[index]
        else:
            return {}
        return dict(decode_tree(options, find))

    def _parameter_state(
        self, parameter: nn.Parameter, name: str, options: Mapping[str, Any], rows: RowSlice | None
    ) -> dict[str, Any]:
        """The state of a parameter, on its device and sharded like it."""
        state, _, find = self._states[name]
        # torch keeps scalars such as `step` on the host unless the optimizer is capturable or fused.
        on_device = bool(options.get("capturable") or options.get("fused"))

        def place(key: str) -> Tensor:
            tensor = find(key)
            if rows is not None:
                # Copies: safetensors maps files, so that other rows would share the memory of a step count.
                is_whole = tensor.shape == (rows.size, *parameter.shape[1:])
                tensor = (rows.of(tensor) if is_whole else tensor).clone()
            if tensor.shape == parameter.shape and tensor.dim():
                return distribute_like(tensor, parameter)
            return tensor.to(parameter.device) if tensor.dim() or on_device else tensor

        return dict(decode_tree(state, place))
