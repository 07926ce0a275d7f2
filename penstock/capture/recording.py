"""A recorded forward with everything needed to replay it, and how it is made.

`make_recording` runs the forward at least twice. A leaf that tensors enter or leave in unexpected ways is opened and
the forward recorded again. Two forwards under different seeds must give the same record: a difference means that
Python state or randomness would be frozen into it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from penstock.capture.arguments import structure_of, unknown_origin
from penstock.capture.fingerprint import model_settings
from penstock.capture.generators import seed_generators
from penstock.capture.granularity import Granularity
from penstock.capture.graph_builder import build_graph
from penstock.capture.hooks import (
    has_user_hooks,
    intercept_autograd_functions,
    intercept_modules,
    intercept_scripted_functions,
    without_user_hooks,
)
from penstock.capture.isolation import isolated, uncompiled
from penstock.capture.objects import copy_leaf
from penstock.capture.recorder import LeakyLeaf, Recorder
from penstock.capture.tensor_table import buffers_and_attributes, device_of
from penstock.errors import CaptureError, PenstockError
from penstock.ir import Call, Graph, Guard, Record, Tree, named_inputs, object_keys, refs, states, transform

_SEEDS = (1, 2)
_OUTPUT = "the output of the model"


@dataclass(frozen=True)
class Recording:
    """One forward of a model, for batches of one signature."""

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
    volatile: frozenset[str] = frozenset()
    """settings that the forward itself changes, so that a change does not make the recording invalid"""

    @cached_property
    def written_inputs(self) -> frozenset[str]:
        """The inputs that the model writes into."""
        return self.graph.written & set(self.record.inputs)

    def available_values(self, nodes: Iterable[str]) -> set[str]:
        """The values that a stage with these nodes has: inputs, and whatever the nodes read and make."""
        chosen = [self.graph[name] for name in nodes]
        made = {value.name for node in chosen for value in node.makes}
        return made | {value for node in chosen for value in node.reads} | set(self.record.inputs)


def make_recording(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], granularity: Granularity
) -> Recording:
    """Record the forward of a model on a batch. The model is left as it was."""
    with isolated(model), uncompiled():
        before = model_settings(model, granularity)
        first = _record_opening(model, args, kwargs, granularity, _SEEDS[0])
        # The second forward is not isolated from the first, so that a counter that the first increased shows up.
        second = _record_opening(model, args, kwargs, first.granularity, _SEEDS[1])
        after = model_settings(model, granularity)
        difference = _difference(first, second)
        if difference is not None:
            third = _record_opening(model, args, kwargs, first.granularity, _SEEDS[0])
            if _difference(second, third) is None:
                raise CaptureError(
                    "the first forward initialises state that later ones use",
                    where=difference.values["where"],
                    hint="call the model once on this batch, and capture it then",
                )
            raise difference
    changed = (name for name in {**before, **after} if before.get(name) != after.get(name))
    return replace(first, volatile=frozenset(changed))


def _record_opening(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], granularity: Granularity, seed: int
) -> Recording:
    """Record one forward; if a leaf leaks, open it and all of its class, and record again."""
    skip_hooks = True
    while True:
        leaves = granularity.leaves(model)
        try:
            with without_user_hooks(leaves.values() if skip_hooks else ()):
                return _record_once(model, args, kwargs, granularity, seed)
        except CaptureError:
            # The model may depend on its hooks, such as one that collects router logits for the loss.
            if not skip_hooks or not has_user_hooks(leaves.values()):
                raise
            skip_hooks = False
        except LeakyLeaf as leak:
            if leak.leaf not in leaves:
                raise CaptureError(
                    "a value enters or leaves a function other than through tensors in its arguments and results",
                    where=leak.leaf,
                    **({"made_in": leak.maker} if leak.maker else {}),
                    hint="keep the module that contains both as one block (basic_blocks)",
                ) from None
            granularity = granularity.open_like(model, leak.leaf)


def _record_once(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], granularity: Granularity, seed: int
) -> Recording:
    recorder = Recorder(model, set(granularity.leaves(model)))
    # Copies, as the model may write into its inputs. The same tensor given twice becomes two inputs: in another batch
    # they may differ.
    args, kwargs = transform(args, copy_leaf), transform(kwargs, copy_leaf)
    inputs = [
        (name, leaf) for name, leaf in named_inputs(model.forward, args, kwargs).items() if isinstance(leaf, Tensor)
    ]
    for name, tensor in inputs:
        recorder.table.add(tensor, name)
    seed_generators(seed)
    recorder.context.start_rng()
    try:
        output = _run_model(model, recorder, args, kwargs)
    finally:
        for tensor, content in recorder.state_before.values():
            tensor.data.copy_(content)
        changed = recorder.writer.restore_constants()
    if changed:
        raise CaptureError(
            "the forward writes into a tensor that is not part of the model",
            shape=tuple(changed[0].shape),
            dtype=changed[0].dtype,
            hint="make it a buffer (register_buffer), or keep the module whole (basic_blocks)",
        )
    outputs = recorder.writer.write(output, _OUTPUT)
    _refuse_replaced_state(model, recorder)
    steps = _without_unread_updates(recorder.steps, outputs)
    record = Record(tuple(name for name, _ in inputs), steps, outputs, frozenset(recorder.sized))
    graph = build_graph(model, record, recorder.table, recorder.notes)
    notes = recorder.notes.items()
    return Recording(
        record,
        recorder.writer.live,
        graph,
        granularity,
        str(device_of(model)),
        state_views=frozenset(filter(recorder.table.is_view_of_state, graph.written)),
        returned=recorder.returned,
        nodes_adding_loss=frozenset(name for name, note in notes if note.adds_loss),
        nodes_taking_gradients=frozenset(name for name, note in notes if note.takes_gradients),
    )


def _run_model(model: nn.Module, recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the forward under the recorder; an error names the module in which it happened."""
    try:
        with (
            intercept_modules(model, recorder.module_called),
            intercept_autograd_functions(recorder.function_applied),
            intercept_scripted_functions(recorder.script_called),
            recorder,
        ):
            return model(*args, **kwargs)
    except (LeakyLeaf, PenstockError):
        raise
    except Exception as error:
        failed, module = recorder.failure
        raise CaptureError(
            "the model cannot be run on this batch",
            module=(module if failed is error else "") or "the model",
            error=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}",
            hint="call the model itself with this batch, and correct types and shapes of its arguments",
        ) from error


def _without_unread_updates(steps: Iterable[Call | Guard], outputs: Tree) -> tuple[Call | Guard, ...]:
    """The steps without the values of written buffers that nothing reads."""
    steps = tuple(steps)
    read = set(refs(outputs)).union(*({*refs(step.args), *refs(step.kwargs)} for step in steps))

    def reduced(call: Call) -> Call:
        updates = tuple((value, buffer) for value, buffer in call.results.updates if value in read)
        return replace(call, results=replace(call.results, updates=updates))

    return tuple(reduced(step) if isinstance(step, Call) else step for step in steps)


def _refuse_replaced_state(model: nn.Module, recorder: Recorder) -> None:
    """Refuse a forward that assigns a new tensor to a parameter or buffer between its blocks."""
    # A plain tensor attribute that is assigned in every forward matters only if the forward reads the old one.
    read = {name for step in recorder.steps for name in (*states(step.args), *states(step.kwargs))}
    attributes = [(name, tensor) for name, tensor in buffers_and_attributes(model).items() if name in read]
    for name, tensor in (*model.named_parameters(), *model.named_buffers(), *attributes):
        if id(tensor) not in recorder.table.state and recorder.table.name(tensor) is not None:
            raise CaptureError(
                "a parameter or buffer is replaced during the forward",
                name=name,
                hint="call the model once before, if only its first forward does so; else write in place (copy_, mul_ "
                "...), or keep its module whole (basic_blocks)",
            )


# Comparing two recordings


def _difference(first: Recording, second: Recording) -> CaptureError | None:
    """The error for the first difference between two recordings of the same batch; None if they are the same."""
    one, other = first.record, second.record
    for a, b in zip(one.steps, other.steps, strict=False):
        if a != b:
            return _changed(a.name)
    if len(one.steps) != len(other.steps):
        longer = max(one.steps, other.steps, key=len)
        return _changed(longer[min(len(one.steps), len(other.steps))].name)
    for key, value in first.live.items():
        if isinstance(value, Tensor) and value is not second.live.get(key):
            # A constant tensor that every forward creates again, in a way that the torch function mode does not see.
            used = (step.name for step in one.steps if key in (*object_keys(step.args), *object_keys(step.kwargs)))
            return unknown_origin(value, next(used, _OUTPUT))
        if not _same_constant(value, second.live.get(key)):
            return _changed(key)
    # In tuples, which compare by identity first: NaN is not equal to itself.
    return _changed(_OUTPUT) if (one.outputs,) != (other.outputs,) else None


def _same_constant(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Generator):
        # A generator made in every forward starts from its seed each time; a replay would keep drawing from one.
        return one is other
    try:
        if one is other or bool(one == other) or callable(one):
            return True
        has_own_eq = any("__eq__" in vars(kind) for kind in type(one).__mro__ if kind is not object)
        return not has_own_eq and structure_of(_attributes(one)) == structure_of(_attributes(other))
    except (ValueError, RuntimeError, TypeError):
        return repr(one) == repr(other)


def _attributes(thing: Any) -> dict[str, Any]:
    return dict(getattr(thing, "__dict__", {}))


def _changed(where: str) -> CaptureError:
    return CaptureError(
        "the model runs differently each time: Python state or randomness between its blocks",
        where=where,
        hint="turn it off (LayerDrop, masking by numpy ...), or keep the module whole with basic_blocks",
    )
