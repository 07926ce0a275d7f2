"""Recording: a record with what it needs to be played, and how it is made."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from penstock.capture.book import home_of, other_state
from penstock.capture.calls import watched_functions, watched_modules, watched_scripts
from penstock.capture.form import settings
from penstock.capture.generators import seed_generators
from penstock.capture.graphing import graph_of
from penstock.capture.hooks import has_users_hooks, silent_hooks
from penstock.capture.leaves import Granularity
from penstock.capture.recorder import OpenLeaf, Recorder
from penstock.capture.structure import structure_of
from penstock.capture.surroundings import uncompiled, undisturbed
from penstock.capture.trees import unknown_origin
from penstock.errors import CaptureError, PenstockError
from penstock.ir import Call, Graph, Guard, Record, Tree, named_inputs, object_keys, refs, states, transform

_SEEDS = (1, 2)
"""Recording twice from different seeds finds randomness and Python state that would be frozen into the record."""


@dataclass(frozen=True)
class Traits:
    """What was noticed of a forward besides its calls."""

    adding: frozenset[str] = frozenset()
    """the nodes that add to the loss"""
    differentiating: frozenset[str] = frozenset()
    """the nodes that take gradients in their forward: there a gradient is a value like any other"""
    volatile: frozenset[str] = frozenset()
    """settings that the forward itself changes, so that a change tells nothing"""


@dataclass(frozen=True)
class Recording:
    """One forward of a model for batches of one form."""

    record: Record
    live: dict[str, Any]
    graph: Graph
    granularity: Granularity
    home: str
    """the device of the model when it was recorded"""
    in_state: frozenset[str] = frozenset()
    """values that lie in the memory of a buffer and are written there: whoever takes one out of a stage needs a copy"""
    answers: dict[str, Any] = field(default_factory=dict)
    """what the calls returned that returned no single tensor, by name: Parts, with Refs for tensors"""
    traits: Traits = Traits()

    @property
    def adding(self) -> frozenset[str]:
        """The nodes that add to the loss, and so matter whoever reads what they make."""
        return self.traits.adding

    @cached_property
    def has_guards(self) -> bool:
        """Whether the model decides by the content of tensors."""
        return any(isinstance(step, Guard) for step in self.record.steps)

    @cached_property
    def written_inputs(self) -> frozenset[str]:
        """The inputs that the model writes into."""
        return self.graph.written & set(self.record.inputs)

    def at_hand(self, nodes: Iterable[str]) -> set[str]:
        """The values that are there where some nodes run: the inputs, what they make and what they read."""
        chosen = [self.graph[name] for name in nodes]
        made = {value.name for node in chosen for value in node.makes}
        return made | {value for node in chosen for value in node.reads} | set(self.record.inputs)


def make_recording(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], granularity: Granularity
) -> Recording:
    """Run the model twice on the batch, from different seeds, and write down what happens."""
    with undisturbed(model), uncompiled():
        before = settings(model, granularity)
        first = _record_opening(model, args, kwargs, granularity, _SEEDS[0])
        # The second forward starts from what the first one left behind, so that a count that it keeps shows.
        second = _record_opening(model, args, kwargs, first.granularity, _SEEDS[1])
        after = settings(model, granularity)
        _check_same(first, second, lambda: _record_opening(model, args, kwargs, first.granularity, _SEEDS[0]))
    changed = (name for name in {**before, **after} if before.get(name) != after.get(name))
    return replace(first, traits=replace(first.traits, volatile=frozenset(changed)))


def _record_opening(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], granularity: Granularity, seed: int
) -> Recording:
    """Record; open leaves that tensors enter or leave by other ways than arguments and results, and record again.

    Hooks on leaves are silent, unless the forward fails without them.
    """
    silent = True
    while True:
        leaves = granularity.leaves(model)
        try:
            with silent_hooks(leaves.values() if silent else ()):
                return _record_once(model, args, kwargs, granularity, seed)
        except CaptureError:
            if not silent or not has_users_hooks(leaves.values()):
                raise
            silent = False
        except OpenLeaf as leak:
            if leak.leaf not in leaves:
                raise CaptureError(
                    "something gets into or out of a function other than by tensors among its arguments and results",
                    where=leak.leaf,
                    **({"made_in": leak.maker} if leak.maker else {}),
                    hint="keep the module around both whole (basic_blocks)",
                ) from None
            granularity = granularity.open_like(model, leak.leaf)


def _record_once(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], granularity: Granularity, seed: int
) -> Recording:
    recorder = Recorder(model, set(granularity.leaves(model)))
    # The same tensor given twice is two inputs: in another batch they may differ.
    args, kwargs = transform(args, _own), transform(kwargs, _own)
    inputs = [
        (name, leaf) for name, leaf in named_inputs(model.forward, args, kwargs).items() if isinstance(leaf, Tensor)
    ]
    for name, tensor in inputs:
        recorder.book.add(tensor, name)
    seed_generators(seed)
    recorder.moods.begin_drawing()
    try:
        output = _output(model, recorder, args, kwargs)
    finally:
        for tensor, content in recorder.page.kept.values():
            tensor.data.copy_(content)
        changed = recorder.trees.put_back_constants()
    if changed:
        raise CaptureError(
            "the forward writes into a tensor that is no part of the model",
            shape=tuple(changed[0].shape),
            dtype=changed[0].dtype,
            hint="make it a buffer (register_buffer), or keep the module whole (basic_blocks)",
        )
    outputs = recorder.trees.write(output, "the output of the model")
    steps = _with_read_updates(recorder.page.steps, outputs)
    _check_state(model, recorder)
    names = tuple(name for name, _ in inputs)
    record = Record(names, steps, outputs, frozenset(recorder.page.sized))
    graph = graph_of(model, record, recorder.book, recorder.page.notes)
    in_state = frozenset(filter(recorder.book.is_in_state, graph.written))
    home, page = str(home_of(model)), recorder.page
    traits = Traits(
        frozenset(name for name, note in page.notes.items() if note.adds_loss),
        frozenset(name for name, note in page.notes.items() if note.takes_gradients),
    )
    return Recording(record, recorder.trees.live, graph, granularity, home, in_state, page.answers, traits)


def _output(model: nn.Module, recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the forward under the eyes of the recorder."""
    with (
        watched_modules(model, recorder.module_called),
        watched_functions(recorder.apply_called),
        watched_scripts(recorder.script_called),
        recorder,
    ):
        return _answer(model, recorder, args, kwargs)


def _answer(model: nn.Module, recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the model returns; if it cannot be run, the error says where and why."""
    try:
        return model(*args, **kwargs)
    except (OpenLeaf, PenstockError):
        raise
    except Exception as error:
        failed, module = recorder.page.failed
        raise CaptureError(
            "the model cannot be run on this batch",
            module=(module if failed is error else "") or "the model",
            error=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}",
            hint="call the model itself with this batch; the types and shapes must be those that it takes",
        ) from error


def _with_read_updates(steps: Iterable[Call | Guard], outputs: Tree) -> tuple[Call | Guard, ...]:
    """The steps without values of written buffers that nobody reads."""
    steps = tuple(steps)
    read = set(refs(outputs)).union(*({*refs(step.args), *refs(step.kwargs)} for step in steps))
    return tuple(_with_updates(step, read) if isinstance(step, Call) else step for step in steps)


def _with_updates(call: Call, read: set[str]) -> Call:
    updates = tuple((value, buffer) for value, buffer in call.results.updates if value in read)
    return replace(call, results=replace(call.results, updates=updates))


def _check_state(model: nn.Module, recorder: Recorder) -> None:
    """Refuse a forward that puts another tensor in the place of a parameter or buffer between its blocks.

    A plain tensor that is set anew in every forward matters only if the forward reads the one before.
    """
    plain = {name for step in recorder.page.steps for name in (*states(step.args), *states(step.kwargs))}
    others = [(name, tensor) for name, tensor in other_state(model).items() if name in plain]
    for name, tensor in (*model.named_parameters(), *model.named_buffers(), *others):
        if id(tensor) not in recorder.book.state and recorder.book.name(tensor) is not None:
            raise CaptureError(
                "a parameter or buffer is replaced during the forward",
                name=name,
                hint="call the model once before, if only its first forward does so; else write in place (copy_, mul_ "
                "...), or keep its module whole (basic_blocks)",
            )


def _own(leaf: object) -> object:
    """The model may write into its inputs; those of the user stay as they are."""
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _check_same(first: Recording, second: Recording, again: Callable[[], Recording]) -> None:
    """Refuse a forward that goes another way the second time; a third one tells whether it does so ever after."""
    difference = _difference(first, second)
    if difference and not _difference(second, again()):
        raise CaptureError(
            "the first forward prepares something that later ones use",
            where=difference.values["where"],
            hint="call the model once on this batch, and capture it then",
        )
    if difference:
        raise difference


def _difference(first: Recording, second: Recording) -> CaptureError | None:
    try:
        _compare(first, second)
    except CaptureError as error:
        return error
    return None


def _compare(first: Recording, second: Recording) -> None:
    for one, other in zip(first.record.steps, second.record.steps, strict=False):
        if one != other:
            raise _changed(one.name)
    if len(first.record.steps) != len(second.record.steps):
        longer = max(first.record.steps, second.record.steps, key=len)
        raise _changed(longer[min(len(first.record.steps), len(second.record.steps))].name)
    for key, value in first.live.items():
        if isinstance(value, Tensor) and value is not second.live.get(key):
            used = (
                step.name for step in first.record.steps if key in (*object_keys(step.args), *object_keys(step.kwargs))
            )
            raise unknown_origin(value, next(used, "the output of the model"))
        if not _alike(value, second.live.get(key)):
            raise _changed(key)
    if (first.record.outputs,) != (second.record.outputs,):
        raise _changed("the output of the model")


def _alike(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Generator):
        # One that is made in every forward begins anew each time, and one that is kept goes on.
        return one is other
    try:
        if one is other or bool(one == other) or callable(one):
            return True
        return not _compares(one) and structure_of(_held(one)) == structure_of(_held(other))
    except (ValueError, RuntimeError, TypeError):
        return repr(one) == repr(other)


def _held(thing: Any) -> dict[str, Any]:
    """What an object is made of, as far as it says."""
    return dict(getattr(thing, "__dict__", {}))


def _compares(thing: Any) -> bool:
    return any("__eq__" in vars(kind) for kind in type(thing).__mro__ if kind is not object)


def _changed(where: str) -> CaptureError:
    return CaptureError(
        "the model does something else each time it runs: Python state or randomness between its blocks",
        where=where,
        hint="turn it off (LayerDrop, masking by numpy ...), or keep the module whole with basic_blocks",
    )
