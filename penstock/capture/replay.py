"""Replay: prepares some calls of a recording to be run again, on new values and any modules of the same names."""

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.capture.recording import Recording
from penstock.errors import CaptureError
from penstock.ir.containers import leaves, put_together
from penstock.ir.record import Call, Guard, Live, Mood, Pack, Ref, State, Tree, refs

Values = dict[str, Any]
Step = Callable[[Values], None]
Getter = Callable[[Values], Any]


class Replay:
    """Steps that read and write values by name."""

    def __init__(
        self,
        recording: Recording,
        nodes: Collection[str],
        modules: nn.Module,
        wanted: Collection[str],
        whole: nn.Module | None = None,
    ) -> None:
        self._recording, self._modules = recording, modules
        self._whole = whole or modules
        chosen = [step for step in recording.record.steps if self._belongs(step, set(nodes))]
        self._keep = set(wanted)
        self._steps = list(self._prepared(chosen))

    def run(self, values: Values) -> Values:
        """Run all steps; returns the wanted values. Others are dropped after their last use."""
        values = dict(values)
        for step in self._steps:
            step(values)
        return {name: values[name] for name in self._keep}

    def _belongs(self, step: Call | Guard, nodes: set[str]) -> bool:
        if isinstance(step, Call):
            return step.name in nodes
        return set(_reads(step)) <= self._recording.at_hand(nodes)

    def _prepared(self, steps: list[Call | Guard]) -> Iterator[Step]:
        last: dict[str, int] = {}
        for place, step in enumerate(steps):
            for name in (*_reads(step), *_makes(step)):
                last[name] = place
        for place, step in enumerate(steps):
            dropped = [name for name, end in last.items() if end == place and name not in self._keep]
            run = self._call(step) if isinstance(step, Call) else self._guard(step)
            yield _then_drop(run, dropped) if dropped else run

    def _call(self, call: Call) -> Step:
        function = self._modules.get_submodule(call.target) if call.is_module else self._recording.live[call.target]
        args, kwargs = self._getter(call.args), self._getter(call.kwargs)
        results, plain, writes = call.results.values, call.results.plain, call.writes
        record, graph = self._recording.record, self._recording.graph
        sizes = [(name, graph.spec(name).shape) for name in dict.fromkeys(results) if name in record.sized]

        def run(values: Values) -> None:
            result = function(*args(values), **kwargs(values))
            for new, old in writes:
                values[new] = values[old]
            if isinstance(result, Tensor):
                values[results[0]] = result
            else:
                found = leaves(result)
                made = [leaf for leaf in found if isinstance(leaf, Tensor)]
                if len(made) != len(results):
                    raise _otherwise(call.name, f"{len(results)} tensors", f"{len(made)} tensors")
                values.update(zip(results, made, strict=True))
                if plain and plain != tuple(leaf for leaf in found if _is_plain(leaf)):
                    raise _otherwise(call.name, plain, tuple(leaf for leaf in found if _is_plain(leaf)))
            for name, size in sizes:
                if values[name].shape != size:
                    raise _otherwise(name, f"size {tuple(size)}", f"size {tuple(values[name].shape)}")

        return run if call.mood == Mood() else _in_mood(run, call.mood)

    def _guard(self, guard: Guard) -> Step:
        function, expected = self._recording.live[guard.target], self._recording.live[guard.expected]
        args, kwargs = self._getter(guard.args), self._getter(guard.kwargs)

        def run(values: Values) -> None:
            found = function(*args(values), **kwargs(values))
            if not expected.agrees(found):
                raise CaptureError(
                    "the model decides by the content of a tensor, and decides otherwise for this batch",
                    module=guard.scope or "the model",
                    read_by=guard.name,
                    recorded=expected.value,
                    found=found,
                    hint="keep the module that decides whole (basic_blocks), or record with a batch of this kind",
                )

        return run

    def _getter(self, tree: Tree) -> Getter:
        """A function that makes the Python structure of a tree from values."""
        if isinstance(tree, Ref):
            name = tree.value
            return lambda values: values[name]
        if isinstance(tree, State):
            path, _, attribute = tree.name.rpartition(".")
            owner = self._modules.get_submodule(path)
            if not hasattr(owner, attribute):
                # A plain tensor of the model, which it may replace at any time.
                owner = self._whole.get_submodule(path)
            return lambda values: getattr(owner, attribute)
        if isinstance(tree, Live):
            return self._live(tree.key)
        if isinstance(tree, Pack):
            return self._pack(tree)
        return lambda values: tree

    def _live(self, key: str) -> Getter:
        thing = self._recording.live[key]
        if isinstance(thing, torch.device) and str(thing) == self._recording.home:
            modules = self._modules
            return lambda values: _device_of(modules, thing)
        return lambda values: thing

    def _pack(self, pack: Pack) -> Getter:
        kind = self._recording.live[pack.kind]
        items = [self._getter(item) for item in pack.items]
        keys = [self._getter(key)({}) for key in pack.keys]
        if not any(_varies(item) for item in pack.items):
            fixed = put_together(kind, keys, [item({}) for item in items])
            # A fresh container each time: callees may change what they are given.
            return lambda values: put_together(kind, keys, [item({}) for item in items]) if keys else fixed
        if kind is tuple:
            return lambda values: tuple([item(values) for item in items])
        if kind is dict:
            return lambda values: {key: item(values) for key, item in zip(keys, items, strict=True)}
        return lambda values: put_together(kind, keys, [item(values) for item in items])


def _is_plain(leaf: object) -> bool:
    return leaf is None or type(leaf) in (bool, int, float, str)


def _otherwise(where: str, recorded: object, found: object) -> CaptureError:
    return CaptureError(
        "the model goes by what a part of it returned, and that is another for this batch",
        where=where,
        recorded=recorded,
        found=found,
        hint="keep the module that uses it whole (basic_blocks), or record with a batch of this kind",
    )


def output_of(recording: Recording, values: Values, modules: nn.Module) -> Any:
    """What the model returns, from the values that it mentions."""
    return Replay(recording, (), modules, ())._getter(recording.record.outputs)(values)


def _varies(tree: Tree) -> bool:
    return isinstance(tree, Ref | State | Live) or (isinstance(tree, Pack) and any(map(_varies, tree.items)))


def _reads(step: Call | Guard) -> tuple[str, ...]:
    written = tuple(old for _, old in step.writes) if isinstance(step, Call) else ()
    return (*refs(step.args), *refs(step.kwargs), *written)


def _makes(step: Call | Guard) -> tuple[str, ...]:
    return (*step.results.values, *(new for new, _ in step.writes)) if isinstance(step, Call) else ()


def _then_drop(run: Step, names: list[str]) -> Step:
    def dropping(values: Values) -> None:
        run(values)
        for name in names:
            values.pop(name, None)

    return dropping


def _in_mood(run: Step, mood: Mood) -> Step:
    def moody(values: Values) -> None:
        with _mood(mood):
            run(values)

    return moody


@contextmanager
def _mood(mood: Mood) -> Iterator[None]:
    with ExitStack() as stack:
        if mood.grad is not None:
            stack.enter_context(torch.set_grad_enabled(mood.grad))
        if mood.autocast is not None:
            device, enabled, dtype = mood.autocast
            kind = getattr(torch, dtype.removeprefix("torch."))
            stack.enter_context(torch.autocast(device, enabled=enabled, dtype=kind))
        yield


def _device_of(modules: nn.Module, fallback: torch.device) -> torch.device:
    for tensor in (*modules.parameters(), *modules.buffers()):
        return tensor.device
    return fallback
