"""Describes everything that the cost of a node depends on, to group equal nodes and as the key of cached profiles."""

import functools
import hashlib
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.capture import MODULE_ATTRIBUTES, code_lines, code_origin, device_of, object_items
from penstock.ir import Container, Graph, Node, NodeBytes, NodeCost, ObjectRef, Ref, SavedTensors, State, Tree
from penstock.measure.measured_model import MeasuredModel
from penstock.measure.memory import Memory
from penstock.measure.timing import device_name

_METHOD = 4
"""increased when the method of measuring changes: then cached profiles are not used any more"""
_INDEX_NAMES = re.compile(r"_?((layer|block|stage|module)_?(idx|index|id|number|num|i)|idx|index)")
"""attributes in which modules keep their own position: without them, no two layers would be equal"""
_PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_MAX_DEPTH, _MAX_ITEMS = 5, 256


def profile_key(subject: MeasuredModel) -> str:
    """A digest of everything that a measurement depends on, the same in every process that would measure the same.

    That is the model, its code, the shapes and dtypes of its batch, the device, and the settings of torch.
    """
    describe = Describer(with_positions=True)
    nodes = [describe.node(subject, node) for node in subject.graph.nodes]
    # The code of all classes of the model except torch's own, for which its version stands.
    kinds = {kind for part in subject.model.modules() for kind in type(part).__mro__}
    code = _digest(sorted({_class_source(kind) for kind in kinds if code_origin(kind.__module__) != "torch"}))
    device = device_of(subject.model)
    kind = device.type if torch.amp.is_autocast_available(device.type) else "cpu"
    # A cached profile without a new field would have its default, as if the field had been measured.
    cost_fields = [each.name for record in (NodeCost, NodeBytes, SavedTensors) for each in fields(record)]
    parts = (
        _METHOD,
        cost_fields,
        subject.graph.fingerprint,
        code,
        device_name(device),
        torch.__version__,
        torch.get_num_threads(),
        torch.backends.cpu.get_cpu_capability(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
        *nodes,
    )
    return _digest(map(str, parts))


def group_equal_nodes(subject: MeasuredModel) -> list[list[Node]]:
    """The nodes in groups that do the same work, so that measuring a few of each group is enough.

    Nodes of a group have the same code, settings, modes, shapes and dtypes, and share memory in the same way. Only a
    module's own position, such as `layer_idx`, may differ. Work that depends on the content of tensors is not seen.
    """
    describe, groups = Describer(with_positions=False), dict[str, list[Node]]()
    for node in subject.graph.nodes:
        groups.setdefault(describe.node(subject, node), []).append(node)
    return list(groups.values())


def transfer_memory(memory: Memory, measured: Node, other: Node) -> Memory:
    """The memory of a measured node in terms of another node of its group."""
    names = dict(zip(_value_names(measured), _value_names(other), strict=True))
    holds = replace(
        memory.holds,
        values=tuple(names[name] for name in memory.holds.values),
        late_values=tuple(names[name] for name in memory.holds.late_values),
        late_gradients=tuple(names[name] for name in memory.holds.late_gradients),
    )
    return memory._replace(holds=holds)


def _value_names(node: Node) -> tuple[str, ...]:
    return (*node.reads, *(value.name for value in node.makes))


class Describer:
    """Describes nodes, modules and Python values as text; objects that many share are described once."""

    def __init__(self, with_positions: bool) -> None:
        """`with_positions` distinguishes modules that differ only in their own position."""
        self._with_positions = with_positions
        self._known: dict[tuple[int, int], tuple[Any, str]] = {}

    def node(self, subject: MeasuredModel, node: Node) -> str:
        """Everything that the work of a node depends on, except the content of tensors."""
        graph, call, names = subject.graph, subject.calls[node.name], _value_names(node)
        is_module = call.is_module
        target = subject.model.get_submodule(call.target) if is_module else subject.live[call.target]
        positions = {name: position for position, name in enumerate(names)}
        return repr(
            (
                is_module,
                _digest(line for path, part in target.named_modules() for line in self._lines(path, part))
                if is_module
                else self.value(target),
                [graph.spec(name) for name in names],
                _sharing(graph, names),
                [self._tree(tree, positions, subject) for tree in (call.args, call.kwargs)],
                (call.results.structure, len(call.results.values), len(call.results.updates), len(call.writes)),
                call.context,
                node.from_inputs,
            )
        )

    def _tree(self, tree: Tree, positions: Mapping[str, int], subject: MeasuredModel) -> Any:
        """Arguments with values by their positions, and parameters by shape and dtype."""
        if isinstance(tree, Ref):
            return "value", positions.get(tree.value)
        if isinstance(tree, State):
            path, _, name = tree.name.rpartition(".")
            return "state", self.value(getattr(subject.model.get_submodule(path), name, None))
        if isinstance(tree, ObjectRef):
            return "live", self.value(subject.live[tree.key])
        if isinstance(tree, Container):
            kind = self.value(subject.live[tree.kind])
            return kind, *(self._tree(part, positions, subject) for part in (*tree.keys, *tree.items))
        return repr(tree)

    def _lines(self, path: str, part: nn.Module) -> Iterator[str]:
        yield f"{path} {_class_name(type(part))} {part.training}"
        for kind in (part._parameters, part._buffers):
            yield from (f"{name} {_tensor(tensor)}" for name, tensor in kind.items())
        hooks = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
        yield " ".join(self.value(hook) for kind in hooks for hook in kind.values())
        for name, value in vars(part).items():
            is_position = type(value) is int and _INDEX_NAMES.fullmatch(name) and not self._with_positions
            if name not in MODULE_ATTRIBUTES and not is_position:
                yield f"{name}={self.value(value)}"

    def value(self, value: Any, depth: int = _MAX_DEPTH) -> str:
        """A value by its content, down to some depth."""
        if isinstance(value, _PLAIN_TYPES):
            return repr(value)
        if isinstance(value, Tensor):
            return _tensor(value)
        if isinstance(value, np.ndarray):
            return f"array {value.shape} {value.dtype}"
        # The value is kept beside, so that its id() is not given to another object.
        kept = self._known.get((id(value), depth))
        if kept is None:
            kept = self._known[id(value), depth] = (value, self._compound(value, depth))
        return kept[1]

    def _compound(self, value: Any, depth: int) -> str:
        name = _class_name(type(value))
        if isinstance(value, type):
            return _class_name(value)
        if not depth or isinstance(value, nn.Module):
            return name
        if isinstance(value, list | tuple | set | frozenset) and len(value) <= _MAX_ITEMS:
            items = [self.value(item, depth - 1) for item in value]
            # The order of a set differs between processes.
            return f"{name}({', '.join(sorted(items) if isinstance(value, set | frozenset) else items)})"
        if isinstance(value, dict) and len(value) <= _MAX_ITEMS:
            return f"{name}({', '.join(f'{key}: {self.value(item, depth - 1)}' for key, item in value.items())})"
        if inspect.isfunction(value):
            name += f" {value.__qualname__} {_digest(code_lines(value.__code__))}"
        elif inspect.ismethod(value):
            # Not the object that it is bound to, which may be the model.
            return f"{name}({self.value(value.__func__, depth - 1)})"
        elif callable(value) and hasattr(value, "__qualname__"):
            return f"{name}({value.__qualname__})"
        held = dict(object_items(value))
        return f"{name}({self.value(held, depth - 1) if len(held) <= _MAX_ITEMS else ''})"


def _sharing(graph: Graph, names: Iterable[str]) -> list[int]:
    """Equal numbers for values that share memory; odd ones for values that are written in place."""
    group_of = {name: index for index, group in enumerate(graph.storage) for name in group.values}
    first_position: dict[int, int] = {}
    numbers = []
    for position, name in enumerate(names):
        group = group_of.get(name, -1 - position)
        numbers.append(first_position.setdefault(group, position) * 2 + (name in graph.written))
    return numbers


def _tensor(tensor: Tensor | None) -> str:
    if tensor is None:
        return "None"
    return f"{type(tensor).__name__} {tuple(tensor.shape)} {tensor.dtype} {tensor.device} {tensor.requires_grad}"


def _class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


# Code


@functools.cache
def _class_source(kind: type) -> str:
    """The code of a class, and of its file, as the class may call functions beside it."""
    functions = [value for value in vars(kind).values() if inspect.isfunction(value)]
    methods = _digest(line for function in functions for line in code_lines(function.__code__))
    path = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return f"{_class_name(kind)} {methods} {_file_digest(path)}"


@functools.cache
def _file_digest(path: str) -> str:
    """A digest of the file when it is first read; empty if there is none, as in a notebook."""
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return ""


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()
