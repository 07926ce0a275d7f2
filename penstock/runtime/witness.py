"""Witness: looks at all that the stages of one process make, forward and backward, and tells where it first broke."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.ir import Graph, Node, leaves
from penstock.runtime.blame import Blame
from penstock.runtime.health import are_finite, severity
from penstock.stages import Stage


class Witness:
    """Present while a step runs; `forward` and `backward` say for each stage what was the first to break there."""

    def __init__(self, stages: Mapping[int, Stage]) -> None:
        self.stages = stages
        self.forward: dict[int, Blame] = {}
        self.backward: dict[int, Blame] = {}
        self._sight: Sight | None = None

    @contextmanager
    def looking(self) -> Iterator["Witness"]:
        """Inside, also the modules within blocks are looked at."""
        with ExitStack() as hooks:
            for stage in self.stages.values():
                for name, module in _open_modules(stage):
                    hooks.callback(module.register_forward_hook(partial(self._returned, name)).remove)
            yield self

    def _returned(self, name: str, module: nn.Module, given: Any, result: Any) -> None:
        if self._sight is not None:
            self._sight.inside.setdefault(severity(leaves(result)), name)

    def sight(self, stage: int, microbatch: int, graph: Graph, inputs: Mapping[str, Any]) -> "Sight":
        """What sees the forward of one stage on one microbatch, and the backward of it."""
        self._sight = Sight(self, Blame(stage, microbatch), graph, inputs)
        return self._sight

    def own(self, stage: int | None) -> Blame | None:
        """What this process found, of the forward of a stage, or of any backward: then of the last stage there is."""
        if stage is not None:
            return self.forward.get(stage)
        found = {index: blame for index in self.stages if (blame := self._of_gradients(index))} | self.backward
        return found[max(found)] if found else None

    def _of_gradients(self, index: int) -> Blame | None:
        """Weight gradients that were put off are no part of the graph; the last one there is comes first."""
        named = [(name, one.grad) for name, one in self.stages[index].named_parameters() if one.grad is not None]
        broken = [name for name, gradient in named if not are_finite((gradient,))]
        return Blame(index, None, f"the gradient of {broken[-1]}") if broken else None


class Sight:
    """Sees one forward of a stage, call by call."""

    def __init__(self, witness: Witness, place: Blame, graph: Graph, inputs: Mapping[str, Any]) -> None:
        self._witness, self._place, self._graph, self._inputs = witness, place, graph, inputs
        self.inside: dict[int, str] = {}
        """the first module within the present call that returned numbers of each severity"""
        self._first: dict[int, str] = {}
        """the first that was broken so badly"""
        self._seen: set[Any] = set()

    def see(self, node: str, made: Mapping[str, Any]) -> None:
        """A call has made these values."""
        found = severity(made.values())
        if found and found not in self._first:
            self._first[found] = self._cause(self._graph[node], found)
        self.inside = {}
        self._follow(node, made.values())

    def end(self, left: Iterable[object], loss: Tensor | None) -> None:
        """The forward is through, and counts; of what broke on the way, as masks are, only what is still broken."""
        if loss is not None:
            self._follow("the loss function", (loss,))
        if found := severity(left):
            what = self._first.get(found) or next(iter(self._first.values()), "")
        else:
            what = "the loss" if severity((loss,)) else ""
        if what:
            self._witness.forward.setdefault(self._place.stage, self._place.because(what))

    def _cause(self, node: Node, found: int) -> str:
        """What was given was broken already, or the parameters were, or a module inside was the first, or the call."""
        stage = self._witness.stages[self._place.stage]
        given = (
            ("input", node.reads, self._inputs),
            ("parameter", node.parameters, dict(stage.named_parameters(remove_duplicate=False))),
            ("buffer", node.buffers, dict(stage.named_buffers(remove_duplicate=False))),
        )
        for kind, names, own in given:
            broken = [name for name in names if severity((own.get(name),)) >= found]
            if broken:
                return f"the {kind} {broken[0]}"
        return f"the output of {self.inside.get(found, node.name)}"

    def _follow(self, node: str, values: Iterable[object]) -> None:
        """Look at what every function that autograd has noted since the last call will return."""
        tensors = (value for value in values if isinstance(value, Tensor))
        waiting = [value.grad_fn for value in tensors if value.grad_fn is not None]
        while waiting:
            function = waiting.pop()
            # Who accumulates outlives the step, and what it is given has been looked at.
            if function not in self._seen and not hasattr(function, "variable"):
                self._seen.add(function)
                function.register_hook(partial(self._went_back, node))
                waiting += [following for following, _ in function.next_functions if following is not None]

    def _went_back(self, node: str, returned: Sequence[Any], given: Sequence[Any]) -> None:
        stage = self._place.stage
        if stage not in self._witness.backward and severity(returned) and not severity(given):
            self._witness.backward[stage] = self._place.because(f"the gradient returned by {node}")


def _open_modules(stage: Stage) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a stage by name, without what is inside of compiled ones, which would be compiled anew."""
    closed: list[str] = []
    for name, module in stage.named_modules():
        if _is_compiled(module):
            closed.append(f"{name}.")
        elif name and not any(f"{name}.".startswith(prefix) for prefix in closed):
            yield name, module


def _is_compiled(module: nn.Module) -> bool:
    own = vars(module)
    is_wrapped = "_orig_mod" in own.get("_modules", {})
    return isinstance(module, torch.jit.ScriptModule) or is_wrapped or own.get("_compiled_call_impl") is not None
