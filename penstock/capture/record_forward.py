"""Records the forward of a model on a batch.

    make_recording             records the forward twice, and compares the two recordings
      _Forward.record          opens blocks, or treats functions as one call, until the forward can be recorded
        _Forward._record_once  runs the forward under a `Recorder`, and builds the graph

A single forward suffices if an earlier recording made the same calls with other sizes, for example for a batch of
another length.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.capture.arguments import short_name
from penstock.capture.fingerprint import model_settings
from penstock.capture.functions import WholeFunctions, intercept_functions, replaced_entries
from penstock.capture.generators import seed_generators
from penstock.capture.granularity import Granularity
from penstock.capture.graph_builder import build_graph, outputs_reaching
from penstock.capture.hooks import (
    has_hooks,
    has_user_hooks,
    hooks_of_model,
    intercept_autograd_and_scripted_functions,
    intercept_modules,
    without_user_hooks,
)
from penstock.capture.isolation import isolated, uncompiled
from penstock.capture.objects import copy_leaf, register_containers
from penstock.capture.random_draws import DrawSeed, intercept_draws
from penstock.capture.recorder import BypassedBlock, LeakyCall, NewContainer, NotReplayable, Recorder
from penstock.capture.recording import OUTPUT, RecordedForward, Recording, caches_constants, difference
from penstock.capture.tensors import buffers_and_attributes, device_of, restore_content, tensors_in
from penstock.capture.transforms import transform_entries
from penstock.errors import CaptureError, PenstockError
from penstock.ir import Call, Guard, Record, Tree, map_leaves, named_inputs, refs
from penstock.launch import one_line

_SEEDS = (1, 2)
"""of the global generators in the first and the second forward: code that draws from them unseen makes these differ"""
_NO_HOOKS = "support saved tensor hooks"
"""part of the error of torch.func.grad and others if such hooks are active"""


def make_recording(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    granularity: Granularity,
    seed: DrawSeed,
    is_known: Callable[[str], bool],
    functions: WholeFunctions,
) -> tuple[Recording, frozenset[str]]:
    """Record the forward of a model on a batch. The model is left as it was.

    Random numbers between blocks, on which the forward may depend, are those that a replay with the same seed draws.
    `is_known` returns whether a structure hash is that of an earlier recording of this model with the same settings.
    `functions` are those that earlier recordings recorded as one call. The second result names the settings
    that the forward itself changes: a later change of these does not make the recording invalid.
    """
    forward = _Forward(model, args, kwargs, seed)
    with isolated(model), uncompiled():
        before = model_settings(model, granularity)
        first = forward.record(_SEEDS[0], granularity, functions)
        recording, error = first.recording, None
        if recording.python_draws or not is_known(recording.structure_hash):
            # The second forward is not isolated from the first, so that a counter that the first increased shows up.
            second = forward.record(_SEEDS[1], recording.granularity, recording.functions)
            error = difference(recording, second.recording)
        after = model_settings(model, granularity)
        if error is not None and not caches_constants(model, first, second):
            # A third forward shows whether only the first one differs, or every one.
            third = forward.record(_SEEDS[0], recording.granularity, recording.functions)
            if difference(second.recording, third.recording) is None:
                raise CaptureError(
                    "the first forward initialises state that later ones use",
                    where=error.values["where"],
                    **{name: error.values[name] for name in ("line",) if name in error.values},
                    hint="call the model once on this batch, and capture it then",
                )
            raise error
    return recording, frozenset(name for name in {**before, **after} if before.get(name) != after.get(name))


@dataclass
class _Forward:
    """The forward of a model on a batch, with the random numbers of a seed."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    seed: DrawSeed
    frees_saved_tensors: bool = True
    """whether activations are freed after each call; False once a call has turned out not to run then"""

    def record(self, global_seed: int, granularity: Granularity, functions: WholeFunctions) -> RecordedForward:
        """Record one forward; if the recorder finds that it must be recorded in another way, record it again.

        Each retry makes a change that is not undone, so this ends: a block is opened, a class registered as a
        container, a function recorded as one call, or such a function opened. `global_seed` seeds the global
        generators, which no call between blocks may draw from unseen.
        """
        skip_hooks = True
        functions = functions.copy()
        hooks = hooks_of_model(self.model)
        while True:
            blocks = granularity.blocks(self.model)
            # A replay would run these hooks for the block, but not the code that reads what they leave. Hooks of opened
            # modules are recorded.
            if hooked := [name for name, block in blocks.items() if has_hooks(block, hooks)]:
                granularity = replace(granularity, opened=granularity.opened.union(hooked))
                continue
            try:
                with without_user_hooks(blocks.values() if skip_hooks else ()):
                    recorded = self._record_once(global_seed, granularity, functions)
            except NewContainer:
                # Calls before this one were recorded with the object as a constant.
                continue
            except BypassedBlock as bypassed:
                # Only its siblings: in another module, blocks of the same class may be called.
                around = bypassed.block.rpartition(".")[0]
                granularity = granularity.open_like(self.model, bypassed.block, around)
            except NotReplayable as error:
                (functions.drawing if error.draws else functions.reading).append(error.function)
            except LeakyCall as leak:
                if leak.where in blocks:
                    granularity = granularity.open_like(self.model, leak.where)
                elif functions.reading:
                    # A function recorded as one call leaks.
                    named = (each for each in functions.reading if leak.where.endswith(f"/{short_name(each)}"))
                    functions.open(next(named, functions.reading[-1]))
                else:
                    raise CaptureError(
                        "a value enters or leaves a function other than through tensors in its arguments and results",
                        where=leak.where,
                        **({"made_in": leak.maker} if leak.maker else {}),
                        hint="keep the module that contains both as one block (basic_blocks)",
                    ) from None
            except CaptureError as error:
                if self.frees_saved_tensors and _NO_HOOKS in str(error.values.get("error")):
                    self.frees_saved_tensors = False
                elif functions.reading:
                    # The cause may be a function recorded as one call: open the last one and retry.
                    functions.open(functions.reading[-1])
                elif skip_hooks and has_user_hooks(blocks.values()):
                    # The model may depend on its hooks, such as one that collects router logits for the loss.
                    skip_hooks = False
                else:
                    raise
            else:
                reading_functions, reading_modules = _find_readers(self.model, recorded.recording)
                if not reading_functions and not reading_modules:
                    return recorded
                functions.reading += reading_functions
                granularity = replace(granularity, basic_blocks=(*granularity.basic_blocks, *reading_modules))

    def _record_once(self, global_seed: int, granularity: Granularity, functions: WholeFunctions) -> RecordedForward:
        """Run the forward under a Recorder, and build the Recording from its steps."""
        model = self.model
        register_containers((self.args, self.kwargs))
        seed_generators(global_seed)
        around_calls = _saved_tensors_freed if self.frees_saved_tensors else nullcontext
        recorder = Recorder(model, granularity, self.seed, global_seed, functions, around_calls)
        # Copies, as the model may write into its inputs. The same tensor given twice becomes two inputs: in another
        # batch they may differ.
        args, kwargs = map_leaves(self.args, copy_leaf), map_leaves(self.kwargs, copy_leaf)
        inputs = [name for name, leaf in named_inputs(model.forward, args, kwargs).items() if isinstance(leaf, Tensor)]
        try:
            output = _run_model(recorder, args, kwargs)
        finally:
            for tensor, content in recorder.state_before.values():
                restore_content(tensor, content)
            changed = recorder.writer.restore_constants()
        if changed:
            raise CaptureError(
                "the forward writes into a tensor that is not part of the model",
                shape=tuple(changed[0].shape),
                dtype=changed[0].dtype,
                hint="make it a buffer (register_buffer), or keep the module whole (basic_blocks)",
            )
        if register_containers(output):
            raise NewContainer
        outputs = recorder.writer.write(output, OUTPUT)
        state = buffers_and_attributes(model)
        constants = _constant_values(recorder, state)
        _refuse_replaced_state(recorder, state, constants)
        steps = _without_unread_updates(recorder.steps, outputs)
        if not any(isinstance(step, Call) for step in steps):
            raise CaptureError(
                "the forward must call a module or a function of torch, got one that calls none",
                model=type(model).__name__,
                hint="a model with layers",
            )
        record = Record(tuple(inputs), steps, outputs)
        graph = build_graph(model, record, recorder.table, recorder.notes)
        notes = recorder.notes.items()
        recording = Recording(
            record,
            recorder.writer.live,
            graph,
            granularity,
            str(device_of(model)),
            state_views=frozenset(filter(recorder.table.is_view_of_state, graph.written)),
            returned=recorder.returned,
            nodes_adding_loss=frozenset(name for name, note in notes if note.adds_loss),
            nodes_taking_gradients=frozenset(name for name, note in notes if note.takes_gradients),
            outputs_reaching=outputs_reaching(recorder.table.edges, graph.outputs),
            seed=self.seed,
            shared_draws=frozenset(name for name, note in notes if note.is_shared_draw),
            python_draws=frozenset(name for name, note in notes if note.draws_with_python),
            functions=functions,
            enclosing=recorder.enclosing,
            lines=dict(zip(map(id, steps), recorder.lines, strict=True)),
            size_reads=recorder.size_reads,
        )
        tensors = tuple(tensor.detach() for tensor in tensors_in(output))
        return RecordedForward(recording, recorder.table.values_named(constants), tensors)


@contextmanager
def _saved_tensors_freed() -> Iterator[None]:
    """Free at exit what autograd has saved in the body: a recording runs no backward, except inside of a call.

    The activations of the whole model may not fit in the memory of a rank that trains a part of it.
    """
    saved: list[list[Tensor]] = []

    def pack(tensor: Tensor) -> list[Tensor]:
        saved.append([tensor])
        return saved[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held[0]):
        try:
            yield
        finally:
            for held in saved:
                held.clear()


def _find_readers(model: nn.Module, recording: Recording) -> tuple[list[Callable[..., Any]], list[str]]:
    """Find code that reads activations into Python, such as box matching, so that it is recorded as one call.

    Returns the functions of the user that do so, or that make tensors which no recorded call returned, and the names
    of the opened modules without parameters that do so. Between calls of the latter a cut would gain nothing.
    """
    known = recording.available_values(recording.nodes_without_weights)
    functions: dict[Callable[..., Any], None] = {}
    scopes: set[str] = set()
    for index, step in enumerate(recording.record.steps):
        reads_activations = isinstance(step, Guard) and not known.issuperset(step.arg_values)
        if index in recording.enclosing:
            if isinstance(step, Call) or reads_activations:
                functions[recording.enclosing[index]] = None
        elif reads_activations:
            scopes.add(step.scope)
    granularity = recording.granularity
    modules = [
        scope
        for scope in sorted(scopes - granularity.opened - {"", *granularity.basic_blocks})
        if next(model.get_submodule(scope).parameters(), None) is None
    ]
    return list(functions), modules


def _constant_values(recorder: Recorder, state: Mapping[str, Tensor]) -> set[str]:
    """The values that depend on no input, parameter, random number, or buffer that the forward writes.

    `state` has the buffers and plain tensors of the model after the forward.
    """
    found: set[str] = set()
    written = {name for note in recorder.notes.values() for name in note.written_state}
    # A buffer that the forward replaces, as a counter, has another value next time.
    constant = {name for name, tensor in recorder.table.buffers.items() if state.get(name) is tensor} - written
    for step in recorder.steps:
        if isinstance(step, Guard) or step.is_module or step.writes or recorder.notes[step.name].is_random:
            continue
        if found.issuperset(step.arg_values) and constant.issuperset(step.arg_states):
            found.update(step.results.values)
    return found


def run_with_draws(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], recording: Recording, seed: DrawSeed
) -> Any:
    """Call the model, not the recording, with the random numbers that a replay of the recording draws with the seed."""

    def keep_saved_tensors() -> AbstractContextManager[Any]:
        # Hooks that keep tensors as they are override those of a checkpoint around the call. The checkpoint would run
        # the call again in backward, where nothing seeds it. No hooks elsewhere: torch.func.grad refuses all hooks.
        if not recorder.context_tracker.in_checkpoint():
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)

    recorder = Recorder(model, recording.granularity, seed, seed.step_seed, recording.functions, keep_saved_tensors)
    return _run_model(recorder, args, kwargs)


def _run_model(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the forward under the recorder; an error names the module in which it happened."""
    model = recorder.model
    for name, leaf in named_inputs(model.forward, args, kwargs).items():
        if isinstance(leaf, Tensor):
            recorder.table.add(leaf, name)
            recorder.has_single_sample |= leaf.dim() > 0 and leaf.shape[0] == 1
    try:
        with (
            intercept_draws(recorder.draw_called, model),
            intercept_functions(recorder.draw_called, recorder.functions.drawing),
            intercept_functions(recorder.whole_function_called, recorder.functions.reading),
            intercept_modules(model, recorder.module_called),
            intercept_autograd_and_scripted_functions(recorder.autograd_function_called, recorder.script_called),
            replaced_entries(recorder.transform_called, transform_entries()),
            recorder,
        ):
            try:
                return model(*args, **kwargs)
            finally:
                recorder.stop()
    except (BypassedBlock, LeakyCall, NotReplayable, NewContainer, PenstockError):
        raise
    except Exception as error:
        failed, module = recorder.failure
        raise CaptureError(
            "the model cannot be run on this batch",
            module=(module if failed is error else "") or "the model",
            error=one_line(error),
            hint="call the model itself with this batch, and correct types and shapes of its arguments",
        ) from error
    finally:
        # The traceback of the error refers to the recorder, and this is a cycle, as with `Recorder.writer`.
        recorder.failure = (None, "")


def _without_unread_updates(steps: Iterable[Call | Guard], outputs: Tree) -> tuple[Call | Guard, ...]:
    """The steps without the values of written buffers that nothing reads."""
    steps = tuple(steps)
    read = set(refs(outputs)).union(*(step.arg_values for step in steps))

    def reduced(call: Call) -> Call:
        updates = tuple((value, buffer) for value, buffer in call.results.updates if value in read)
        return replace(call, results=replace(call.results, updates=updates))

    return tuple(reduced(step) if isinstance(step, Call) else step for step in steps)


def _refuse_replaced_state(recorder: Recorder, state: Mapping[str, Tensor], constants: set[str]) -> None:
    """Refuse a forward that assigns a new tensor to a parameter or buffer between its blocks.

    A buffer that is not saved may be assigned a constant: the recording computes it in every replay.
    """
    # A plain tensor attribute that is assigned in every forward matters only if the forward reads the old one.
    read = {name for step in recorder.steps for name in step.arg_states}
    model = recorder.model
    attributes = [(name, tensor) for name, tensor in state.items() if name in read]
    for name, tensor in (*model.named_parameters(), *model.named_buffers(), *attributes):
        if id(tensor) in recorder.table.state:
            continue
        value = recorder.table.name(tensor)
        path, _, attribute = name.rpartition(".")
        owner = model.get_submodule(path)
        is_saved = attribute in {*owner._parameters.keys(), *owner._buffers.keys()} - owner._non_persistent_buffers_set
        is_cached = value in constants and not is_saved
        if value is not None and not is_cached:
            raise CaptureError(
                "a parameter or buffer is replaced during the forward",
                name=name,
                hint="call the model once before, if only its first forward does so; else write in place (copy_, mul_ "
                "...), or keep its module whole (basic_blocks)",
            )
