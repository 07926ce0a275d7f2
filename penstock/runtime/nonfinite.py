"""Finds the first stage, and within it the first operation or gradient, that produced NaN or Inf.

Every training step keeps the smallest and largest entry that each stage produced. If one of them is not finite, the
step is run again with a `NonfiniteProbe`, which checks the result of every call.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn

from penstock.capture import INEXACT_DTYPES, extremes, is_inexact
from penstock.ir import Graph, Node, leaves
from penstock.runtime.groups import ProcessGroups
from penstock.runtime.tensor_parallel import stored_entries
from penstock.stages import Stage

INPUT, TARGET, PARAMETER, BUFFER = "input", "target", "parameter", "buffer"
NONFINITE_HINT = "a smaller learning rate, or clip_grad_norm_"


class Extremes:
    """The smallest and largest entries of tensors by stage, kept on the device until `nonfinite_stages` reads them."""

    def __init__(self) -> None:
        self._extremes: dict[tuple[int, bool], list[Tensor]] = {}
        """by stage, and whether they are those of gradients"""

    def add(self, stage: int, values: Iterable[object], is_gradient: bool = False) -> None:
        """Add outputs or gradients of a stage. Of a sharded tensor only this rank's shard counts."""
        found = self._extremes.setdefault((stage, is_gradient), [])
        for value in values:
            # Not `is_inexact`, and `stored_entries` only where it is needed: every value of every step comes here.
            if isinstance(value, Tensor) and value.dtype in INEXACT_DTYPES:
                if type(value) is not Tensor or value.is_sparse:
                    value = stored_entries(value)
                found += extremes(value.detach() if value.requires_grad else value)

    def nonfinite_stages(self) -> tuple[set[int], set[int]]:
        """The stages with NaN or Inf in an output, and those with one in a gradient."""
        outputs, gradients = set[int](), set[int]()
        everything = list(chain.from_iterable(self._extremes.values()))
        # Read at once, because on a GPU every read waits for the device.
        values = iter(torch.stack(everything).tolist() if everything else ())
        for (stage, is_gradient), own in self._extremes.items():
            own_values = list(islice(values, len(own)))
            if not all(map(math.isfinite, own_values)):
                (gradients if is_gradient else outputs).add(stage)
        return outputs, gradients


def all_finite(tensors: Iterable[Tensor | None]) -> bool:
    """Whether no entry of any tensor is NaN or Inf."""
    found = Extremes()
    found.add(0, tensors)
    return not any(found.nonfinite_stages())


def _severity(values: Iterable[object]) -> int:
    """2 if any entry is NaN or positive infinity, 1 if one is negative infinity, as in masks; else 0."""
    worst = 0
    for value in values:
        if isinstance(value, Tensor) and is_inexact(value):
            for extreme in extremes(stored_entries(value.detach())):
                number = float(extreme)
                worst = max(worst, 0 if math.isfinite(number) else 1 if number < 0 else 2)
    return worst


@dataclass(frozen=True)
class NonfiniteOrigin:
    """Where NaN or Inf came from: stage, microbatch where that is known, and a description for the user."""

    stage: int
    microbatch: int | None = None
    description: str = ""
    kind: str = ""
    """INPUT, TARGET, PARAMETER or BUFFER; empty for a value that was computed"""

    @property
    def hint(self) -> str:
        """The suggestion in the error message."""
        if self.kind in (INPUT, TARGET):
            return "a batch without NaN and Inf"
        if self.kind in (PARAMETER, BUFFER):
            return "weights from before an earlier step broke them: pipe.load(directory) of a checkpoint"
        return NONFINITE_HINT

    @property
    def error_values(self) -> dict[str, object]:
        """The values of an error message."""
        position = {} if self.microbatch is None else {"microbatch": self.microbatch}
        return {"first_not_finite": self.description, **position}


def agree_on_origin(groups: ProcessGroups, local: NonfiniteOrigin | None) -> NonfiniteOrigin | None:
    """Agree on one origin on every rank: the one in the last stage, of the first pipeline that found any."""
    origin = None if local is None else [local.stage, local.microbatch, local.description, local.kind]
    found = map(json.loads, groups.gather_texts_of_all(json.dumps([groups.pipeline, origin])))
    origins = [(pipeline, NonfiniteOrigin(*values)) for pipeline, values in found if values is not None]
    return min(origins, key=lambda pair: (pair[0], -pair[1].stage))[1] if origins else None


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

        def check_result(name: str, module: nn.Module, args: Any, result: Any) -> None:
            if self._current is not None:
                self._current.inside.setdefault(_severity(leaves(result)), name)

        with ExitStack() as hooks:
            for stage in self.stages.values():
                for name, module in _hookable_modules(stage):
                    hooks.callback(module.register_forward_hook(partial(check_result, name)).remove)
            yield self

    def start(self, stage: int, microbatch: int, graph: Graph, inputs: Mapping[str, Any]) -> "StageProbe":
        """Check the forward of one stage on one microbatch, and its backward."""
        self._current = StageProbe(self, NonfiniteOrigin(stage, microbatch), graph, inputs)
        return self._current

    def origin(self, stage: int | None) -> NonfiniteOrigin | None:
        """The origin found by this process in the forward of a stage; with None, in the backward of its last stage."""
        if stage is not None:
            return self.forward.get(stage)
        origins: dict[int, NonfiniteOrigin] = {}
        for index, stage_module in self.stages.items():
            # Deferred weight gradients are computed outside of the autograd graph, where no hook sees them.
            parameters = stage_module.named_parameters()
            nonfinite = [name for name, parameter in parameters if not all_finite((parameter.grad,))]
            if nonfinite:
                origins[index] = NonfiniteOrigin(index, None, f"the gradient of {nonfinite[-1]}")
        origins |= self.backward
        if not origins:
            return None
        last = max(origins)
        # A weight may be Inf without effect on the forward, such as before a tanh.
        for name, parameter in self.stages[last].named_parameters():
            if not all_finite((parameter,)):
                return NonfiniteOrigin(last, None, f"the {PARAMETER} {name}", PARAMETER)
        return origins[last]


class StageProbe:
    """Checks one forward of a stage, call by call."""

    def __init__(self, probe: NonfiniteProbe, origin: NonfiniteOrigin, graph: Graph, inputs: Mapping[str, Any]) -> None:
        self._probe, self._origin, self._graph, self._inputs = probe, origin, graph, inputs
        self.inside: dict[int, str] = {}
        """by severity, the first module within the current call that returned such a value"""
        self._first: dict[int, NonfiniteOrigin] = {}
        """by severity, the first such value"""
        self._hooked: set[Any] = set()

    def check_call(self, node: str, results: Mapping[str, Any]) -> None:
        """Check the values that a call returned."""
        severity = _severity(results.values())
        if severity and severity not in self._first:
            self._first[severity] = self._cause(self._graph[node], severity)
        self.inside = {}
        self._hook_backward(node, results.values())

    def end(self, outputs: Iterable[object], loss: Tensor | None, target: object) -> None:
        """End the forward. Values within the stage, such as masks, count only if its outputs are not finite."""
        if loss is not None:
            self._hook_backward("the loss function", (loss,))
        found = None
        if severity := _severity(outputs):
            found = self._first.get(severity) or next(iter(self._first.values()), None)
        elif _severity((loss,)):
            # -Inf in a target may be a mask; NaN never is.
            is_target = _severity(leaves(target)) > 1
            found = replace(self._origin, description="the target" if is_target else "the loss")
            found = replace(found, kind=TARGET) if is_target else found
        if found is not None:
            self._probe.forward.setdefault(self._origin.stage, found)

    def _cause(self, node: Node, severity: int) -> NonfiniteOrigin:
        """The input, parameter or buffer that was not finite; else the inner module or the call that produced it."""
        stage = self._probe.stages[self._origin.stage]
        sources: tuple[tuple[str, Iterable[str], Mapping[str, Any], int], ...] = (
            (INPUT, node.reads, self._inputs, severity),
            # Masks may be -Inf, but no weight is.
            (PARAMETER, node.parameters, dict(stage.named_parameters(remove_duplicate=False)), 1),
            (BUFFER, node.buffers, dict(stage.named_buffers(remove_duplicate=False)), severity),
        )
        for kind, names, values, least in sources:
            nonfinite = [name for name in names if _severity((values.get(name),)) >= least]
            if nonfinite:
                return replace(self._origin, description=f"the {kind} {nonfinite[0]}", kind=kind)
        return replace(self._origin, description=f"the output of {self.inside.get(severity, node.name)}")

    def _hook_backward(self, node: str, values: Iterable[object]) -> None:
        """Check the gradients that every autograd function added since the last call returns in backward."""

        def check_gradients(grad_inputs: Sequence[Any], grad_outputs: Sequence[Any]) -> None:
            found, stage = self._probe.backward, self._origin.stage
            if stage not in found and _severity(grad_inputs) and not _severity(grad_outputs):
                found[stage] = replace(self._origin, description=f"the gradient returned by {node}")

        tensors = (value for value in values if isinstance(value, Tensor))
        pending = [value.grad_fn for value in tensors if value.grad_fn is not None]
        while pending:
            function = pending.pop()
            # AccumulateGrad nodes outlive the step; their inputs are checked as results of other functions.
            if function not in self._hooked and not hasattr(function, "variable"):
                self._hooked.add(function)
                function.register_hook(check_gradients)
                pending += [following for following, _ in function.next_functions if following is not None]


def _hookable_modules(stage: Stage) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a stage by name, except inside compiled ones, which a hook would cause to be recompiled."""
    compiled: list[str] = []
    for name, module in stage.named_modules():
        attributes = vars(module)
        is_wrapped = "_orig_mod" in attributes.get("_modules", {}) or attributes.get("_compiled_call_impl") is not None
        if is_wrapped or isinstance(module, torch.jit.ScriptModule):
            compiled.append(f"{name}.")
        elif name and not any(f"{name}.".startswith(prefix) for prefix in compiled):
            yield name, module
