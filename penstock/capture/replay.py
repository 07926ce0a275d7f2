"""Replay: prepares some calls of a recording to be run again, on new values and any modules of the same names."""

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from hashlib import blake2b
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from penstock.capture.book import spec_of
from penstock.capture.hooks import has_users_hooks
from penstock.capture.onlooker import present_onlooker
from penstock.capture.recording import Recording
from penstock.capture.structure import TENSOR, structure_of
from penstock.errors import CaptureError
from penstock.ir import Call, CallContext, Container, Guard, ObjectRef, Ref, State, Tree, leaves, put_together, refs

Values = dict[str, Any]
Step = Callable[[Values], None]
Getter = Callable[[Values], Any]
Wrap = Callable[[str, nn.Module], Callable[..., Any]]
_LONGEST_LINE = 60
_WORD = (1 << 64) - 1


class Replay:
    """Steps that read and write values by name."""

    def __init__(
        self,
        recording: Recording,
        nodes: Collection[str],
        modules: nn.Module,
        wanted: Collection[str],
        whole: nn.Module | None = None,
        wrap: Wrap | None = None,
    ) -> None:
        """`wrap`, given the name of a node and its module, says what is called in place of the module."""
        self._recording, self._modules, self._wrap = recording, modules, wrap
        self._whole = whole or modules
        chosen = [step for step in recording.record.steps if self._belongs(step, set(nodes))]
        self._keep = set(wanted)
        self._steps = list(zip(self._prepared(chosen), chosen, strict=True))
        random = {node.name for node in recording.graph.nodes if node.is_random}
        self.takes_gradients = any(step.name in recording.traits.differentiating for step in chosen)
        """some block takes gradients in its forward"""
        self._draws = {place: _key(step.name) for place, step in enumerate(chosen) if step.name in random}

    def run(self, values: Values, seed: int | None = None) -> Values:
        """Run all steps; returns the wanted values. Others are dropped after their last use.

        With a seed, every call draws random numbers of its own, the same whatever runs before it and wherever. Torch's
        generator is left where the last one left it.
        """
        values, draws = dict(values), self._draws if seed is not None else {}
        is_cuda = bool(draws) and self._is_on_cuda()
        show = present_onlooker()
        for place, (step, recorded) in enumerate(self._steps):
            if place in draws:
                _seed(seed, draws[place], is_cuda)  # type: ignore[arg-type]
            step(values)
            if show is not None:
                show(recorded.name, {name: values[name] for name in _makes(recorded) if name in values})
        return {name: self._taken_out(name, values[name]) for name in self._keep}

    def _is_on_cuda(self) -> bool:
        return _device_of(self._modules, torch.device("cpu")).type == "cuda"

    def _taken_out(self, name: str, value: Any) -> Any:
        return value.clone() if name in self._recording.in_state else value

    def _belongs(self, step: Call | Guard, nodes: set[str]) -> bool:
        if isinstance(step, Call):
            return step.name in nodes
        return set(_reads(step)) <= self._recording.at_hand(nodes)

    def _prepared(self, steps: list[Call | Guard]) -> Iterator[Step]:
        last: dict[str, int] = {}
        for place, step in enumerate(steps):
            for name in (*_reads(step), *_makes(step)):
                last[name] = place
        ended: dict[int, list[str]] = {}
        for name in last.keys() - self._keep:
            ended.setdefault(last[name], []).append(name)
        for place, step in enumerate(steps):
            dropped = ended.get(place, [])
            run = self._call(step) if isinstance(step, Call) else self._guard(step)
            yield _then_drop(run, dropped) if dropped else run

    def _call(self, call: Call) -> Step:
        function = self._modules.get_submodule(call.target) if call.is_module else self._recording.live[call.target]
        wrapped = self._wrap(call.name, function) if self._wrap and call.is_module else function
        args, kwargs = self._getter(call.args), self._getter(call.kwargs)
        results, structure, writes = call.results.values, call.results.structure, call.writes
        updates = [(new, self._updated(new, state)) for new, state in call.results.updates]
        record, graph = self._recording.record, self._recording.graph
        sizes = [(name, graph.spec(name).shape) for name in dict.fromkeys(results) if name in record.sized]

        def run(values: Values) -> None:
            result = wrapped(*args(values), **kwargs(values))
            for new, old in writes:
                values[new] = values[old]
            found = TENSOR if isinstance(result, Tensor) else structure_of(result)
            if found != structure:
                raise _otherwise(call.name, structure, found)
            if found == TENSOR:
                values[results[0]] = result
            else:
                values.update(zip(results, (leaf for leaf in leaves(result) if isinstance(leaf, Tensor)), strict=True))
            for new, buffer in updates:
                values[new] = buffer(values)
            for name, size in sizes:
                if values[name].shape != size:
                    raise _otherwise(name, f"size {tuple(size)}", f"size {tuple(values[name].shape)}")

        step = self._then_check_form(run, call) if call.is_module and has_users_hooks([function]) else run
        return step if call.context == CallContext() else _in_mood(step, call.context)

    def _then_check_form(self, run: Step, call: Call) -> Step:
        """Hooks were silent while this was recorded: what they return must look like what was seen then."""
        specs = [(name, self._recording.graph.spec(name)) for name in dict.fromkeys(call.results.values) if name]

        def checked(values: Values) -> None:
            run(values)
            for name, spec in specs:
                found = spec_of(values[name])
                gets_gradient = found.requires_grad and not spec.requires_grad
                if (found.shape, found.dtype) != (spec.shape, spec.dtype) or gets_gradient:
                    raise CaptureError(
                        "a hook changes the form of what a block returns",
                        module=call.target,
                        recorded=spec,
                        found=f"{found}{' that needs a gradient' if gets_gradient else ''}",
                        hint="open the block (depth), so that its hooks are recorded with it",
                    )

        return checked

    def _updated(self, value: str, state: str) -> Getter:
        """A buffer as a call left it: a copy, as the next microbatch writes it again, unless values look into it."""
        buffer = self._getter(State(state))
        if value in self._recording.in_state:
            return buffer
        return lambda values: _copied(buffer(values))

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
                    recorded=shortened(expected.value),
                    found=shortened(found),
                    hint="keep the module that decides whole (basic_blocks), or record with a batch of this kind; a "
                    "number that is only reported can be returned as a tensor (detach)",
                )

        return run

    def _getter(self, tree: Tree) -> Getter:
        """A function that makes the Python structure of a tree from values."""
        if isinstance(tree, Ref):
            name = tree.value
            return lambda values: values[name]
        if isinstance(tree, State):
            owner, attribute = self._owner(tree.name)
            return lambda values: getattr(owner, attribute)
        if isinstance(tree, ObjectRef):
            return self._live(tree.key)
        if isinstance(tree, Container):
            return self._pack(tree)
        return lambda values: tree

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        """The module that has a parameter, buffer or plain tensor, and how it calls it."""
        path, _, attribute = name.rpartition(".")
        for modules in (self._modules, self._whole):
            with suppress(AttributeError):
                owner = modules.get_submodule(path)
                getattr(owner, attribute)
                return owner, attribute
        # The model may set a plain tensor at any time, also after this.
        return self._whole.get_submodule(path), attribute

    def _live(self, key: str) -> Getter:
        thing = self._recording.live[key]
        if isinstance(thing, torch.device) and str(thing) == self._recording.home:
            modules = self._modules
            return lambda values: _device_of(modules, thing)
        return lambda values: thing

    def _pack(self, pack: Container) -> Getter:
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


def shortened(value: object) -> str:
    """A value in one line that is not long."""
    line = " ".join(str(value).split())
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}..."


def _key(name: str) -> int:
    """64 bits that differ from name to name and are the same in every process."""
    return int.from_bytes(blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest(), "big")


def _seed(seed: int, key: int, is_cuda: bool) -> None:
    """Seed torch with a mixture in which every bit depends on every bit of both (the finisher of splitmix64)."""
    mixed = (seed * 0x9E3779B97F4A7C15 + key) & _WORD
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & _WORD
    mixed ^= mixed >> 31
    torch.default_generator.manual_seed(mixed)
    if is_cuda:
        torch.cuda.manual_seed(mixed)


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
    return isinstance(tree, Ref | State | ObjectRef) or (isinstance(tree, Container) and any(map(_varies, tree.items)))


def _reads(step: Call | Guard) -> tuple[str, ...]:
    written = tuple(old for _, old in step.writes) if isinstance(step, Call) else ()
    return (*refs(step.args), *refs(step.kwargs), *written)


def _makes(step: Call | Guard) -> tuple[str, ...]:
    if isinstance(step, Guard):
        return ()
    return (*step.results.values, *(new for new, _ in (*step.writes, *step.results.updates)))


def _copied(tensor: Tensor) -> Tensor:
    # Also where the call ran without gradients, the buffer may be part of a graph.
    with torch.enable_grad():
        return tensor.clone()


def _then_drop(run: Step, names: list[str]) -> Step:
    def dropping(values: Values) -> None:
        run(values)
        for name in names:
            values.pop(name, None)

    return dropping


def _in_mood(run: Step, context: CallContext) -> Step:
    def moody(values: Values) -> None:
        with _mood(context):
            run(values)

    return moody


@contextmanager
def _mood(context: CallContext) -> Iterator[None]:
    with ExitStack() as stack:
        if context.grad is not None:
            stack.enter_context(torch.set_grad_enabled(context.grad))
        if context.autocast is not None:
            device, enabled, dtype = context.autocast
            kind = getattr(torch, dtype.removeprefix("torch."))
            stack.enter_context(torch.autocast(device, enabled=enabled, dtype=kind))
        yield


def _device_of(modules: nn.Module, fallback: torch.device) -> torch.device:
    for tensor in chain(modules.parameters(), modules.buffers()):
        return tensor.device
    return fallback
