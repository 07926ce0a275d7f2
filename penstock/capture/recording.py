"""A recorded forward with everything needed to replay it, and the comparison of two.

A Record is the list of calls (plain data); a Recording adds the live objects and the graph.

Two forwards under different seeds must give the same record: a difference means that Python state or randomness would
be frozen into it.
"""

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.capture.arguments import unknown_origin
from penstock.capture.functions import WholeFunctions
from penstock.capture.granularity import Granularity
from penstock.capture.random_draws import FIRST_SEED, DrawSeed
from penstock.capture.structures import Expected, structure_of
from penstock.capture.tensors import buffers_and_attributes, same_content
from penstock.capture.transforms import TransformedCall
from penstock.errors import CaptureError
from penstock.ir import Call, Container, Graph, Guard, Record, Tree, object_keys, states

OUTPUT = "the output of the model"
"""the place of the model's output in errors"""
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, eq=False)
class Recording:
    """One forward of a model, for batches of one signature; compared by identity."""

    record: Record
    live: dict[str, Any]
    """the functions, classes and constants that the record refers to by key"""
    graph: Graph
    granularity: Granularity
    device: str
    """the device of the model when it was recorded"""
    state_views: frozenset[str] = frozenset()
    """values that are views of a buffer and are written in place: a stage must send copies of them"""
    returned: dict[str, Any] = field(default_factory=dict)
    """the structures that calls returned, except single tensors: Parts, with Refs for tensors, by name of the call"""
    nodes_adding_loss: frozenset[str] = frozenset()
    """nodes that add to the loss, and so are needed even if nothing reads their values"""
    nodes_taking_gradients: frozenset[str] = frozenset()
    """nodes that run autograd in their forward"""
    outputs_reaching: dict[str, frozenset[str]] = field(default_factory=dict)
    """for each value that requires a gradient, the outputs whose backward reaches it"""
    seed: DrawSeed = FIRST_SEED
    """the seed of its random numbers"""
    shared_draws: frozenset[str] = frozenset()
    """nodes that draw one number for the whole batch"""
    python_draws: frozenset[str] = frozenset()
    """nodes that draw from the generators of Python or numpy"""
    functions: WholeFunctions = field(default_factory=WholeFunctions)
    """functions of the user that are recorded as one call"""
    enclosing: dict[int, Callable[..., Any]] = field(default_factory=dict)
    """functions of the user that could be recorded as one call, as a guard or an unknown tensor is inside, by index of
    the step"""
    lines: dict[int, str] = field(default_factory=dict)
    """the line of the user's code for each step of the record, by the step's id()"""
    size_reads: dict[str, tuple[str, str]] = field(default_factory=dict)
    """for each value whose size the model read, the module and line that read it first; the sizes must stay the same"""

    @cached_property
    def written_inputs(self) -> frozenset[str]:
        """The inputs that the model writes into."""
        return self.graph.written & set(self.record.inputs)

    @cached_property
    def calls(self) -> dict[str, int]:
        """By name of a call, its index among the steps."""
        return {step.name: index for index, step in enumerate(self.record.steps) if isinstance(step, Call)}

    @cached_property
    def guards(self) -> list[int]:
        """The indices of the guards among the steps."""
        return [index for index, step in enumerate(self.record.steps) if isinstance(step, Guard)]

    @cached_property
    def structure_hash(self) -> str:
        """A hash of everything except numbers and sizes, which differ between batches of different lengths.

        Recordings of one hash make the same calls in the same order on the same values, with the same side effects.
        """
        record, graph = self.record, self.graph
        steps = [
            (
                *(step.name, step.target, _erased(step.args), _erased(step.kwargs)),
                (step.is_module, step.writes, step.context, step.changes_arguments, _erased(step.results.structure))
                if isinstance(step, Call)
                else (step.scope, _erased(structure_of(self.live[step.expected].value))),
            )
            for step in record.steps
        ]
        constants = [
            (key, id(value) if isinstance(value, Tensor) else _erased(structure_of(value)))
            for key, value in self.live.items()
            if not isinstance(value, Expected)
        ]
        nodes = [replace(node, makes=()) for node in graph.nodes]
        values = [
            (value.name, len(value.spec.shape), value.spec.dtype, value.spec.requires_grad)
            for value in (*graph.inputs, *(value for node in graph.nodes for value in node.makes))
        ]
        parts = (
            *(steps, constants, _erased(record.outputs), sorted(self.size_reads)),
            *(nodes, values, graph.storage, graph.updates, self.granularity, self.device),
            *map(sorted, (self.state_views, self.nodes_adding_loss, self.nodes_taking_gradients, self.shared_draws)),
            sorted((name, *sorted(outputs)) for name, outputs in self.outputs_reaching.items()),
        )
        return blake2b(repr(parts).encode(errors="surrogatepass"), digest_size=16).hexdigest()

    @cached_property
    def nodes_without_weights(self) -> frozenset[str]:
        """The nodes that depend only on the inputs, and on random numbers that are drawn between blocks."""
        calls = {step.name: step for step in self.record.steps if isinstance(step, Call)}
        names, known = set[str](), set(self.record.inputs)
        for node in self.graph.nodes:
            # A second draw from a generator that the model holds would give other numbers.
            has_generator = any(isinstance(self.live[key], torch.Generator) for key in calls[node.name].arg_keys)
            is_plain = not (node.is_block or node.parameters or node.buffers or has_generator)
            if node.from_inputs or (is_plain and known.issuperset(node.reads)):
                names.add(node.name)
                known.update(value.name for value in node.makes)
        return frozenset(names)

    def steps_of(self, nodes: Collection[str]) -> list[Call | Guard]:
        """The calls of some nodes, and the guards that can be checked where these nodes run, in the recorded order."""
        steps = self.record.steps
        available = self.available_values(nodes) if self.guards else set()
        guards = [index for index in self.guards if available.issuperset(steps[index].reads)]
        # Looked up by name: a search through all steps for every stage would take quadratic time.
        calls = [self.calls[name] for name in set(nodes) if name in self.calls]
        return [steps[index] for index in sorted([*calls, *guards])]

    def available_values(self, nodes: Iterable[str]) -> set[str]:
        """The values that a stage with these nodes has: inputs, and all values that the nodes read and make."""
        chosen = [self.graph[name] for name in nodes]
        made = {value.name for node in chosen for value in node.makes}
        return made | {value for node in chosen for value in node.reads} | set(self.record.inputs)


def _erased(tree: Tree) -> Any:
    """A tree with all numbers, also those in strings, replaced by "#"."""
    if isinstance(tree, Container):
        return tree.kind, tuple(map(_erased, tree.keys)), tuple(map(_erased, tree.items))
    if isinstance(tree, str):
        return _NUMBER.sub("#", tree)
    return "#" if type(tree) in (int, float) else tree


# Comparing two recordings


class RecordedForward(NamedTuple):
    """A recording, with the tensors of its forward that are compared with those of a second one."""

    recording: Recording
    constants: tuple[Tensor, ...]
    """the values that depend on no input, weight or random number"""
    outputs: tuple[Tensor, ...]
    """the tensors of the output"""


def difference(first: Recording, second: Recording) -> CaptureError | None:
    """The error for the first difference between two recordings of the same batch; None if they are the same."""
    steps, others = first.record.steps, second.record.steps
    for step, other in zip(steps, others, strict=False):
        if step != other:
            return _not_repeatable(step.name, first.lines[id(step)])
    if len(steps) != len(others):
        # The first step that only one of them has.
        extra = max(steps, others, key=len)[min(len(steps), len(others))]
        return _not_repeatable(extra.name, (first.lines | second.lines)[id(extra)])
    for key, value in first.live.items():
        if isinstance(value, Tensor) and value is not second.live.get(key):
            # A constant tensor that every forward creates again, in a way that the torch function mode does not see.
            users = [step for step in steps if key in step.arg_keys]
            where, line = (users[0].name, first.lines[id(users[0])]) if users else (OUTPUT, "")
            return unknown_origin(value, where, line)
        if not _same_constant(value, second.live.get(key)):
            return _not_repeatable(key)
    # In tuples, which compare by identity first: NaN is not equal to itself.
    return _not_repeatable(OUTPUT) if (first.record.outputs,) != (second.record.outputs,) else None


def _same_constant(first: Any, second: Any) -> bool:
    """Whether two forwards used the same constant, as far as that can be compared."""
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Generator):
        # A generator made in every forward starts from its seed each time; a replay would keep drawing from one.
        return first is second
    if isinstance(first, TransformedCall):
        return first.is_like(second)
    try:
        if first is second or bool(first == second) or callable(first):
            return True
        # Objects without an __eq__ of their own are made again in every forward: compare their attributes.
        has_own_eq = any("__eq__" in vars(kind) for kind in type(first).__mro__ if kind is not object)
        attributes = [structure_of(dict(getattr(value, "__dict__", {}))) for value in (first, second)]
        return not has_own_eq and attributes[0] == attributes[1]
    except (ValueError, RuntimeError, TypeError):
        return repr(first) == repr(second)


def _not_repeatable(where: str, line: str = "") -> CaptureError:
    return CaptureError(
        "the model runs differently each time: Python state or randomness between its blocks",
        **({"line": line} if line else {}),
        where=where,
        hint="turn it off (LayerDrop, masking by numpy ...), or keep the module whole (basic_blocks)",
    )


def caches_constants(model: nn.Module, first: RecordedForward, second: RecordedForward) -> bool:
    """Whether the second forward differs from the first only in that it uses constants that the first computed.

    For example, tables of positions that the model, or a cached function, keeps. The first recording is then right:
    a replay computes them each time.
    """
    state = buffers_and_attributes(model)
    record, live = second.recording.record, second.recording.live
    names = (*states(record.outputs), *(name for step in record.steps for name in step.arg_states))
    keys = (*object_keys(record.outputs), *(key for step in record.steps for key in step.arg_keys))
    used = {*(id(state.get(name)) for name in names), *(id(live[key]) for key in keys)}
    if used.isdisjoint(map(id, first.constants)) or first.recording.graph.updates != second.recording.graph.updates:
        return False
    return len(first.outputs) == len(second.outputs) and all(map(same_content, first.outputs, second.outputs))
