"""Optimizer state: what an optimizer keeps for each parameter, by its name, so that any rank finds it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from penstock.checkpoint.names import listed
from penstock.checkpoint.values import Find, Tensors, from_plain, to_plain
from penstock.errors import CheckpointError, DamagedError

_NOT_OPTIONS = ("params", "param_names")
Spread = Callable[[Tensor, Tensor], Tensor]
"""from a whole tensor to the part of it that this rank has of a parameter"""


@dataclass(frozen=True)
class OptimizerPart:
    """The state of some parameters, as a document and tensors beside it."""

    document: dict[str, Any]
    tensors: Tensors = field(default_factory=dict)


def parted(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], part_of: Mapping[str, int]
) -> dict[int, OptimizerPart]:
    """The state in parts; `names` are by the identity of a parameter, `part_of` says which part keeps which."""
    check_optimizer(optimizer, names)
    parts: dict[int, OptimizerPart] = {}
    kind, states = type(optimizer).__name__, optimizer.state
    others = {key: value for key, value in states.items() if not isinstance(key, Tensor)}
    for place, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            name = names[id(parameter)]
            if name not in part_of:
                continue
            part = parts.setdefault(part_of[name], OptimizerPart({"optimizer": kind, "groups": [], "parameters": {}}))
            state = to_plain(dict(states.get(parameter, {})), part.tensors, name)
            part.document["parameters"][name] = {"group": place, "state": state}
    for part in parts.values():
        part.document["groups"] = [
            to_plain(_options(group), part.tensors, f"group-{place}")
            for place, group in enumerate(optimizer.param_groups)
        ]
        part.document["others"] = to_plain(others, part.tensors, "others")
    return parts


def check_optimizer(optimizer: object, names: Mapping[int, str]) -> None:
    """Refuse what is no optimizer of torch, or has parameters that this rank has not."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise CheckpointError("optimizer is one of torch.optim, or a subclass", given=type(optimizer).__name__)
    if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
        raise CheckpointError(
            "an optimizer that says in its own way what its state is cannot be saved by the names of parameters",
            given=type(optimizer).__name__,
            hint="the optimizer that it is made around, if it is a wrapper; else extra=optimizer.state_dict()",
        )
    strange = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in names]
    if strange:
        raise CheckpointError(
            "the optimizer has parameters that are not of this rank",
            number=len(strange),
            hint="torch.optim.AdamW(pipe.parameters())",
        )


class SavedState:
    """What all parts of a checkpoint say of an optimizer."""

    def __init__(self, parts: Iterable[tuple[dict[str, Any], Find]]) -> None:
        """For each part its document, and what brings its tensors."""
        self.kind = ""
        self._groups: list[tuple[Any, Find]] = []
        self._others: list[tuple[Any, Find]] = []
        self._found: dict[str, tuple[dict[str, Any], Any, Find]] = {}
        for document, find in parts:
            self.kind, groups = document["optimizer"], document["groups"]
            self._groups = self._groups or [(group, find) for group in groups]
            self._others.append((document["others"], find))
            for name, own in document["parameters"].items():
                state, group = own["state"], groups[own["group"]]
                if not (isinstance(state, dict) and isinstance(group, dict)):
                    raise DamagedError("the state of a parameter cannot be read", name=name)
                self._found[name] = (state, group, find)

    def restorer(
        self, optimizer: torch.optim.Optimizer, names: Mapping[int, str], spread: Spread
    ) -> Callable[[], None]:
        """What gives an optimizer its state back; all is read and checked here, nothing changes until it is called."""
        self._check(optimizer, names)
        options = [self._options_of(place, group, names) for place, group in enumerate(optimizer.param_groups)]
        states = {
            parameter: self._state_of(parameter, names[id(parameter)], own, spread)
            for group, own in zip(optimizer.param_groups, options, strict=True)
            for parameter in group["params"]
        }

        others = from_plain(*self._others[0])

        def restore() -> None:
            optimizer.state.clear()
            optimizer.state.update(others)
            for parameter, state in states.items():
                if state:
                    optimizer.state[parameter] = state
            for group, own in zip(optimizer.param_groups, options, strict=True):
                group.update(own)

        return restore

    def _check(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
        if not self._found:
            hint = "load without the optimizer, and begin with a new one"
            raise CheckpointError("no optimizer was saved in this checkpoint", hint=hint)
        if type(optimizer).__name__ != self.kind:
            raise CheckpointError(
                "another optimizer was saved", saved=self.kind, given=type(optimizer).__name__, hint=self.kind
            )
        own = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
        if missing := [name for name in own if name not in self._found]:
            raise CheckpointError(
                "the saved optimizer did not have all parameters of this one", missing=listed(missing)
            )

        if any(others != self._others[0][0] for others, _ in self._others):
            raise CheckpointError(
                "what the optimizer keeps beside the parameters differed from rank to rank",
                hint="load without the optimizer",
            )

    def _options_of(self, place: int, group: dict[str, Any], names: Mapping[int, str]) -> dict[str, Any]:
        found = [self._found[names[id(parameter)]][1:] for parameter in group["params"]]
        if any(options != found[0][0] for options, _ in found):
            raise CheckpointError(
                "parameters of one group were saved in groups with other options",
                group=place,
                hint="the groups that the optimizer had when it was saved",
            )
        # A group that has none of its parameters on this rank still has a learning rate, which a scheduler reads.
        plain, find = found[0] if found else self._groups[place] if place < len(self._groups) else ({}, _nothing)
        return dict(from_plain(plain, find))

    def _state_of(
        self, parameter: nn.Parameter, name: str, options: Mapping[str, Any], spread: Spread
    ) -> dict[str, Any]:
        plain, _, find = self._found[name]
        on_device = bool(options.get("capturable") or options.get("fused"))

        def placed(key: str) -> Tensor:
            tensor = find(key)
            if tensor.shape == parameter.shape and tensor.dim():
                return spread(tensor, parameter)
            return tensor.to(parameter.device) if tensor.dim() or on_device else tensor

        return dict(from_plain(plain, placed))


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in _NOT_OPTIONS}


def _nothing(name: str) -> Tensor:
    raise CheckpointError("no such tensor", name=name)
