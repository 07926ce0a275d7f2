"""Prepares some calls of a recording to be run again, on new values and on modules with the same names.

A `Replay` is built once per stage and recording. Running it for a microbatch is a loop over prepared closures that read
and write a dict of values by name: everything that can be looked up before the first microbatch is.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.capture.arguments import ArgumentReader, Getter, Values
from penstock.capture.call_context import entered
from penstock.capture.hooks import has_user_hooks
from penstock.capture.random_draws import DrawSeed, hash_name, python_seeded, seed_torch
from penstock.capture.recording import Recording
from penstock.capture.structures import structure_of
from penstock.capture.tensors import device_of, spec_of, tensors_in
from penstock.errors import CaptureError
from penstock.ir import TENSOR, Call, CallContext, Guard, Ref, State, map_leaves

Prepared = Callable[[Values], None]
"""runs one call or checks one guard: reads its arguments from the values, and adds its results to them"""
WrapModule = Callable[[str, Callable[..., Any]], Callable[..., Any]]
_MAX_LINE = 60

CallHook = Callable[[str, Mapping[str, Any]], None]
"""called after each replayed call with its name and those of the values it made that are read later"""
_active_hook: ContextVar[CallHook | None] = ContextVar("penstock_call_hook", default=None)


@contextmanager
def call_hook(hook: CallHook | None) -> Iterator[None]:
    """Call the hook after every call that is replayed in the body; None: no hook."""
    token = _active_hook.set(hook)
    try:
        yield
    finally:
        _active_hook.reset(token)


class Replay:
    """The calls of some nodes, and the guards that can be checked where these nodes run."""

    def __init__(
        self,
        recording: Recording,
        nodes: Collection[str],
        modules: nn.Module,
        wanted: Collection[str],
        whole: nn.Module | None = None,
        wrap: WrapModule | None = None,
    ) -> None:
        """Prepare `nodes` to run on submodules of `modules`; `run` returns the `wanted` values.

        State that `modules` lacks is looked up in the `whole` model. `wrap(node, module)` returns the
        callable to use in place of a module.
        """
        self._recording, self._wrap = recording, wrap
        self._arguments = ArgumentReader(recording.live, recording.device, modules, whole)
        self._modules, self._whole = modules, whole or modules
        chosen = recording.steps_of(nodes)
        self._wanted = set(wanted)
        last_use = {name: index for index, step in enumerate(chosen) for name in (*step.reads, *step.makes)}
        dropped: dict[int, list[str]] = {}
        for name in last_use.keys() - self._wanted:
            dropped.setdefault(last_use[name], []).append(name)
        self._steps = [
            (
                self._prepare_call(step) if isinstance(step, Call) else self._prepare_guard(step),
                step,
                dropped.get(index, ()),
            )
            for index, step in enumerate(chosen)
        ]
        """each prepared to run, with the recorded step, and the values that are not used after it"""
        self.takes_gradients = any(step.name in recording.nodes_taking_gradients for step in chosen)
        """whether some call runs autograd in its forward"""
        self._draws = {
            index: (hash_name(step.name), step.name in recording.shared_draws, step.name in recording.python_draws)
            for index, step in enumerate(chosen)
            if isinstance(step, Call) and recording.graph[step.name].is_random
        }
        """of random calls: the hash of the name, whether the draw is for the whole batch, whether it is Python's"""

    def run(self, values: Values, seed: DrawSeed | None = None) -> Values:
        """Run all calls on `values`; returns the wanted values. Others are dropped after their last use.

        With a `seed`, the random numbers of each call depend only on the seed and the name of the call: they are the
        same for any partition and order.
        """
        values = dict(values)
        draws = self._draws if seed is not None else {}
        is_cuda = bool(draws) and device_of(self._modules).type == "cuda"
        hook = _active_hook.get()
        for index, (run_step, step, dropped) in enumerate(self._steps):
            if draws and index in draws:
                name_hash, is_shared, is_python = draws[index]
                call_seed = seed.of_call(name_hash, is_shared)
                seed_torch(call_seed, is_cuda)
                with python_seeded(call_seed) if is_python else nullcontext():
                    run_step(values)
            else:
                run_step(values)
            for name in dropped:
                values.pop(name, None)
            if hook is not None:
                hook(step.name, {name: values[name] for name in step.makes if name in values})
        views = self._recording.state_views
        # A view of a buffer would change when the next microbatch writes the buffer.
        return {name: values[name].clone() if name in views else values[name] for name in self._wanted}

    def _prepare_call(self, call: Call) -> Prepared:
        """A function that makes the call, checks that it returns the recorded structure, and stores its values."""
        function = self._arguments.module(call.target) if call.is_module else self._recording.live[call.target]
        callee = _returning_arguments(function) if call.changes_arguments else function
        if self._wrap is not None and call.is_module:
            callee = self._wrap(call.name, callee)
        prepared = self._make_plain_call(call, callee) or self._make_any_call(call, callee)
        # The user's hooks did not run while this was recorded, so their return values are unknown.
        if call.is_module and has_user_hooks([function]):
            prepared = self._then_check_specs(prepared, call)
        return prepared if call.context == CallContext() else _in_context(prepared, call.context)

    def _make_plain_call(self, call: Call, callee: Callable[..., Any]) -> Prepared | None:
        """A call that returns one new tensor and does nothing else, as most do; None for any other call.

        It is the inner loop of a training step, so it has none of the checks of `_make_any_call`.
        """
        results, structure = call.results.values, call.results.structure
        has_effects = call.writes or call.results.updates
        if structure != TENSOR or has_effects or results[0] in call.arg_values or self._sizes_to_check(call):
            return None
        get_args, get_kwargs = self._argument_getters(call)
        only = _only_argument(call)
        (name,), changed_error = results, self._changed_error(call)

        def run(values: Values) -> None:
            # With one argument, no tuple and dict of arguments are built: that takes as long as a small call.
            result = callee(values[only]) if only else callee(*get_args(values), **get_kwargs(values))
            if not isinstance(result, Tensor):
                raise changed_error(structure, structure_of(result))
            values[name] = result

        return run

    def _make_any_call(self, call: Call, callee: Callable[..., Any]) -> Prepared:
        """A call that may write values and buffers, return its arguments, or return any structure."""
        get_args, get_kwargs = self._argument_getters(call)
        results, structure, writes = call.results.values, call.results.structure, call.writes
        updates = [(new, self._updated_buffer(new, state)) for new, state in call.results.updates]
        # Values that the call was given and returned.
        passed_on = [name for name in dict.fromkeys(results) if name and name in call.arg_values]
        sizes, changed_error = self._sizes_to_check(call), self._changed_error(call)

        def run(values: Values) -> None:
            result = callee(*get_args(values), **get_kwargs(values))
            # A value that the call wrote in place has a new name from here on.
            for new, old in writes:
                values[new] = values[old]
            result_structure = TENSOR if isinstance(result, Tensor) else structure_of(result)
            if result_structure != structure:
                raise changed_error(structure, result_structure)
            given = {name: values[name] for name in passed_on}
            values.update(zip(results, tensors_in(result), strict=True))
            for name, tensor in given.items():
                # The value that was given is still read elsewhere, perhaps by another stage.
                if values[name] is not tensor:
                    raise changed_error("its argument", "another tensor")
            for new, buffer in updates:
                values[new] = buffer(values)
            for name, size in sizes:
                if values[name].shape != size:
                    place = self._recording.size_reads[name]
                    raise _data_dependent(name, *place, f"size {tuple(size)}", f"size {tuple(values[name].shape)}")

        return run

    def _argument_getters(self, step: Call | Guard) -> tuple[Getter, Getter]:
        return self._arguments.getter(step.args), self._arguments.getter(step.kwargs)

    def _sizes_to_check(self, call: Call) -> list[tuple[str, tuple[int, ...]]]:
        """The results whose size the model read, with the recorded sizes."""
        names = (name for name in dict.fromkeys(call.results.values) if name in self._recording.size_reads)
        return [(name, self._recording.graph.spec(name).shape) for name in names]

    def _changed_error(self, call: Call) -> Callable[[object, object], CaptureError]:
        """A function of the recorded and the found structure that returns the error for a changed result."""
        module = self._recording.graph[call.name].module
        if call.is_module:
            # The code that depends on the result of a block is in the module that calls it, which is not a list.
            while module := module.rpartition(".")[0]:
                if not isinstance(self._whole.get_submodule(module), nn.ModuleList | nn.ModuleDict):
                    break
        return partial(_data_dependent, call.name, module, self._recording.lines[id(call)])

    def _then_check_specs(self, run: Prepared, call: Call) -> Prepared:
        """The call, followed by a check that the results of a block have the recorded shapes and dtypes."""
        specs = [(name, self._recording.graph.spec(name)) for name in dict.fromkeys(call.results.values) if name]

        def checked(values: Values) -> None:
            run(values)
            for name, spec in specs:
                found = spec_of(values[name])
                gains_gradient = found.requires_grad and not spec.requires_grad
                if (found.shape, found.dtype) != (spec.shape, spec.dtype) or gains_gradient:
                    raise CaptureError(
                        "a hook changes the shape, dtype or requires_grad of a block's result",
                        module=call.target,
                        recorded=spec,
                        found=f"{found}{' that needs a gradient' if gains_gradient else ''}",
                        hint="open the block (depth), so that its hooks are recorded with it",
                    )

        return checked

    def _updated_buffer(self, value: str, state: str) -> Getter:
        """A function that returns a copy of a buffer after a call: the next microbatch writes the buffer again."""
        buffer = self._arguments.getter(State(state))
        if value in self._recording.state_views:
            # Other values are views of it: it is copied only when it leaves the stage.
            return buffer

        def copied(values: Values) -> Tensor:
            # Even if the call ran without gradients, the buffer may be part of a graph.
            with torch.enable_grad():
                return buffer(values).clone()

        return copied

    def _prepare_guard(self, guard: Guard) -> Prepared:
        """A function that reads the Python value again, and raises if it is another one than was recorded."""
        function, expected = self._recording.live[guard.target], self._recording.live[guard.expected]
        line = self._recording.lines[id(guard)]
        get_args, get_kwargs = self._argument_getters(guard)

        def run(values: Values) -> None:
            found = function(*get_args(values), **get_kwargs(values))
            if not expected.agrees(found):
                raise CaptureError(
                    "data-dependent control flow: the model read a different value from a tensor than when recorded",
                    module=guard.scope or "the model",
                    line=line,
                    read_by=guard.name,
                    recorded=_shortened(expected.value),
                    found=_shortened(found),
                    hint=f"{_keep_whole(guard.scope)}; a number that is only reported can be returned as a tensor "
                    "(detach)",
                )

        return run


def _in_context(run: Prepared, context: CallContext) -> Prepared:
    """The call, run in the grad mode and autocast in which it was recorded."""

    def run_in_context(values: Values) -> None:
        with entered(context):
            run(values)

    return run_in_context


def _returning_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function for a call that changes containers among its arguments: it returns them too.

    It changes copies: when a block is recomputed in backward, it is given the same arguments again.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        copies = map_leaves((args, kwargs), lambda leaf: leaf)
        return function(*copies[0], **copies[1]), *copies

    return call


def _only_argument(call: Call) -> str:
    """The value that a call has as its only argument, as those of most blocks; "" for any other call."""
    items = call.args.items
    is_only = len(items) == 1 and not call.kwargs.items and isinstance(items[0], Ref)
    return items[0].value if is_only else ""


def _data_dependent(where: str, module: str, line: str, recorded: object, found: object) -> CaptureError:
    return CaptureError(
        f"data-dependent control flow: {where} returned a different structure or size than when it was recorded",
        module=module or "the model",
        line=line,
        recorded=recorded,
        found=found,
        hint=_keep_whole(module),
    )


def _keep_whole(module: str) -> str:
    """The hint to keep the smallest module whole that contains a data-dependent decision."""
    if module:
        return f'basic_blocks=["{module}"], which keeps the module that decides whole'
    return (
        "move the decision into a global function, which runs as one call, or into a submodule, and keep that whole "
        "(basic_blocks)"
    )


def _shortened(value: object) -> str:
    line = " ".join(str(value).split())
    return line if len(line) <= _MAX_LINE else f"{line[:_MAX_LINE]}..."
