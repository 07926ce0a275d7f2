"""Finds the first stage, and within it the first operation or gradient, that produced NaN or Inf.

Every training step records the smallest and largest entry that each stage produced. If one of them is not finite, the
step is run again with a `NonfiniteProbe`, which checks the result of every call.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from penstock.ir import Graph, Node, leaves
from penstock.runtime.groups import ProcessGroups
from penstock.stages import Stage


class Extremes:
    """The smallest and largest entries that stages produced, kept on the device until the step is over."""

    def __init__(self) -> None:
        self._extremes: dict[int, list[Tensor]] = {}

    def add(self, stage: int, values: Iterable[object]) -> None:
        """Record the values that a stage produced for one microbatch."""
        found = self._extremes.setdefault(stage, [])
        for value in values:
            if isinstance(value, Tensor) and value.is_floating_point():
                found += _extremes(value.detach())

    def first_nonfinite_stage(self) -> float:
        """The first stage whose forward produced NaN or Inf; inf if all are finite."""
        return min((stage for stage, found in self._extremes.items() if not _all_finite(found)), default=math.inf)


def last_nonfinite_gradient(parameters: Mapping[int, Iterable[nn.Parameter]]) -> float:
    """The last stage with NaN or Inf in a gradient, which is where it came from; -inf if all are finite."""
    nonfinite = (
        stage for stage, own in parameters.items() if not all_finite(p.grad for p in own if p.grad is not None)
    )
    return max(nonfinite, default=-math.inf)


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no entry is NaN or Inf; of sharded tensors, this rank's part is checked."""
    return _all_finite([extreme for tensor in tensors for extreme in _extremes(tensor)])


def _all_finite(values: list[Tensor]) -> bool:
    return not values or bool(torch.stack(values).isfinite().all())


def _extremes(tensor: Tensor) -> Sequence[Tensor]:
    """The smallest and largest entry; both are NaN if any entry is.

    On the host this is many times faster than a norm or isfinite on every entry.
    """
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return torch.aminmax(tensor) if tensor.numel() else ()


def _severity(values: Iterable[object]) -> int:
    """2 if any entry is NaN or positive infinity, 1 if one is negative infinity, as in masks; else 0."""
    worst = 0
    for value in values:
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
            for extreme in _extremes(value.detach()):
                number = float(extreme)
                worst = max(worst, 0 if math.isfinite(number) else 1 if number < 0 else 2)
    return worst


@dataclass(frozen=True)
class NonfiniteOrigin:
    """Where NaN or Inf came from: stage, microbatch where that is known, and a description for the user."""

    stage: int
    microbatch: int | None = None
    description: str = ""

    @property
    def error_values(self) -> dict[str, object]:
        """The values of an error message."""
        place = {} if self.microbatch is None else {"microbatch": self.microbatch}
        return {"first_not_finite": self.description, **place}


def agree_on_origin(groups: ProcessGroups, own: NonfiniteOrigin | None) -> NonfiniteOrigin | None:
    """Agree on one origin on every rank: the one in the last stage, of the first replica that found any."""
    stages = groups.gather(torch.tensor([-1 if own is None else own.stage])).flatten().tolist()
    text = json.dumps(None if own is None else [own.stage, own.microbatch, own.description])
    text = groups.broadcast_text(text, stages.index(max(stages)))
    found = groups.gather_replicas(torch.tensor([int(max(stages) >= 0)])).flatten().tolist()
    origin = json.loads(groups.broadcast_text_to_replicas(text, found.index(max(found))))
    return None if origin is None else NonfiniteOrigin(*origin)


class NonfiniteProbe:
    """Checks everything that the stages of one process compute in a step that is run again."""

    def __init__(self, stages: Mapping[int, Stage]) -> None:
        self.stages = stages
        self.forward: dict[int, NonfiniteOrigin] = {}
        """by stage, the first value that was not finite"""
        self.backward: dict[int, NonfiniteOrigin] = {}
        self._current: StageProbe | None = None

    @contextmanager
    def active(self) -> Iterator["NonfiniteProbe"]:
        """Check the modules inside blocks too while in this context."""
        with ExitStack() as hooks:
            for stage in self.stages.values():
                for name, module in _hookable_modules(stage):
                    hooks.callback(module.register_forward_hook(partial(self._check_module, name)).remove)
            yield self

    def _check_module(self, name: str, module: nn.Module, args: Any, result: Any) -> None:
        if self._current is not None:
            self._current.inside.setdefault(_severity(leaves(result)), name)

    def start(self, stage: int, microbatch: int, graph: Graph, inputs: Mapping[str, Any]) -> "StageProbe":
        """Check the forward of one stage on one microbatch, and its backward."""
        self._current = StageProbe(self, NonfiniteOrigin(stage, microbatch), graph, inputs)
        return self._current

    def origin(self, stage: int | None) -> NonfiniteOrigin | None:
        """The origin found by this process in the forward of a stage; with None, in the backward of its last stage."""
        if stage is not None:
            return self.forward.get(stage)
        found = {index: own for index in self.stages if (own := self._gradient_origin(index))} | self.backward
        return found[max(found)] if found else None

    def _gradient_origin(self, index: int) -> NonfiniteOrigin | None:
        # Deferred weight gradients are computed outside of the autograd graph, where no hook sees them.
        named = [(name, one.grad) for name, one in self.stages[index].named_parameters() if one.grad is not None]
        nonfinite = [name for name, gradient in named if not all_finite((gradient,))]
        return NonfiniteOrigin(index, None, f"the gradient of {nonfinite[-1]}") if nonfinite else None


class StageProbe:
    """Checks one forward of a stage, call by call."""

    def __init__(self, probe: NonfiniteProbe, place: NonfiniteOrigin, graph: Graph, inputs: Mapping[str, Any]) -> None:
        self._probe, self._place, self._graph, self._inputs = probe, place, graph, inputs
        self.inside: dict[int, str] = {}
        """by severity, the first module within the current call that returned such a value"""
        self._first: dict[int, str] = {}
        """by severity, a description of the first such value"""
        self._hooked: set[Any] = set()

    def check_call(self, node: str, results: Mapping[str, Any]) -> None:
        """Check the values that a call returned."""
        severity = _severity(results.values())
        if severity and severity not in self._first:
            self._first[severity] = self._cause(self._graph[node], severity)
        self.inside = {}
        self._hook_backward(node, results.values())

    def end(self, outputs: Iterable[object], loss: Tensor | None) -> None:
        """End the forward. Values within the stage, such as masks, count only if its outputs are not finite."""
        if loss is not None:
            self._hook_backward("the loss function", (loss,))
        if severity := _severity(outputs):
            found = self._first.get(severity) or next(iter(self._first.values()), "")
        else:
            found = "the loss" if _severity((loss,)) else ""
        if found:
            self._probe.forward.setdefault(self._place.stage, replace(self._place, description=found))

    def _cause(self, node: Node, severity: int) -> str:
        """The input, parameter or buffer that was not finite; else the inner module or the call that produced it."""
        stage = self._probe.stages[self._place.stage]
        sources = (
            ("input", node.reads, self._inputs),
            ("parameter", node.parameters, dict(stage.named_parameters(remove_duplicate=False))),
            ("buffer", node.buffers, dict(stage.named_buffers(remove_duplicate=False))),
        )
        for kind, names, values in sources:
            found = [name for name in names if _severity((values.get(name),)) >= severity]
            if found:
                return f"the {kind} {found[0]}"
        return f"the output of {self.inside.get(severity, node.name)}"

    def _hook_backward(self, node: str, values: Iterable[object]) -> None:
        """Check the gradients that every autograd function added since the last call returns in backward."""
        tensors = (value for value in values if isinstance(value, Tensor))
        pending = [value.grad_fn for value in tensors if value.grad_fn is not None]
        while pending:
            function = pending.pop()
            # AccumulateGrad nodes outlive the step; their inputs are checked as results of other functions.
            if function not in self._hooked and not hasattr(function, "variable"):
                self._hooked.add(function)
                function.register_hook(partial(self._check_backward, node))
                pending += [following for following, _ in function.next_functions if following is not None]

    def _check_backward(self, node: str, returned: Sequence[Any], given: Sequence[Any]) -> None:
        stage = self._place.stage
        if stage not in self._probe.backward and _severity(returned) and not _severity(given):
            description = f"the gradient returned by {node}"
            self._probe.backward[stage] = replace(self._place, description=description)


def _hookable_modules(stage: Stage) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a stage by name, except inside compiled ones, which a hook would cause to be recompiled."""
    compiled: list[str] = []
    for name, module in stage.named_modules():
        own = vars(module)
        is_wrapped = "_orig_mod" in own.get("_modules", {}) or own.get("_compiled_call_impl") is not None
        if is_wrapped or isinstance(module, torch.jit.ScriptModule):
            compiled.append(f"{name}.")
        elif name and not any(f"{name}.".startswith(prefix) for prefix in compiled):
            yield name, module
