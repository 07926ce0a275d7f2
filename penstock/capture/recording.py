"""A recorded forward with everything needed to replay it, and the functions that record it.

    make_recording           records the forward twice, and compares the two recordings
      _record_with_retries   opens blocks, or treats functions as one call, until the forward can be recorded
        _record_once         runs the forward under a `Recorder`, and builds the graph

Two forwards under different seeds must give the same record: a difference means that Python state or randomness would
be frozen into it. One forward is enough if its calls are those of an earlier recording with other numbers, as for a
batch of another length.
"""

import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from penstock.capture.arguments import short_name, unknown_origin
from penstock.capture.fingerprint import model_settings
from penstock.capture.functions import WholeFunctions, intercept_functions
from penstock.capture.generators import GeneratorStates, python_generators, seed_generators
from penstock.capture.granularity import Granularity
from penstock.capture.graph_builder import build_graph, outputs_with_gradient
from penstock.capture.hooks import (
    has_user_hooks,
    intercept_autograd_functions,
    intercept_modules,
    intercept_scripted_functions,
    without_user_hooks,
)
from penstock.capture.isolation import isolated, uncompiled
from penstock.capture.objects import copy_leaf, register_containers
from penstock.capture.random_draws import FIRST_SEED, DrawSeed, intercept_draws
from penstock.capture.recorder import (
    BypassedBlock,
    LeakyBlock,
    NewContainer,
    NotReplayable,
    Recorder,
)
from penstock.capture.structures import Expected, structure_of
from penstock.capture.tensors import buffers_and_attributes, device_of, restore_content, same_content, tensors_in
from penstock.capture.transforms import TransformedCall, intercept_transforms
from penstock.errors import CaptureError, PenstockError
from penstock.ir import Call, Container, Graph, Guard, Record, Tree, named_inputs, object_keys, refs, states, transform
from penstock.launch import one_line

_SEEDS = (1, 2)
_OUTPUT = "the output of the model"
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
    outputs_with_gradient: dict[str, frozenset[str]] = field(default_factory=dict)
    """for every value that requires a gradient, the outputs from which backward reaches it"""
    volatile: frozenset[str] = frozenset()
    """settings that the forward itself changes, so that a change does not make the recording invalid"""
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
    """for each value whose size the model read: the module and the line that did so"""
    draws_in_python: bool = False
    """whether anything in the forward, blocks included, drew from the global generators of Python or numpy"""
    constants: tuple[Tensor, ...] = ()
    """the values that depend on no input, weight or random number; only while recordings are compared"""
    output_tensors: tuple[Tensor, ...] = ()
    """the tensors of the output; only while recordings are compared"""

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
            *(steps, constants, _erased(record.outputs), sorted(record.sized)),
            *(nodes, values, graph.storage, graph.updates, self.granularity, self.device),
            *map(sorted, (self.state_views, self.nodes_adding_loss, self.nodes_taking_gradients, self.shared_draws)),
            sorted((name, *sorted(outputs)) for name, outputs in self.outputs_with_gradient.items()),
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

    def available_values(self, nodes: Iterable[str]) -> set[str]:
        """The values that a stage with these nodes has: inputs, and all values that the nodes read and make."""
        chosen = [self.graph[name] for name in nodes]
        made = {value.name for node in chosen for value in node.makes}
        return made | {value for node in chosen for value in node.reads} | set(self.record.inputs)


def make_recording(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    granularity: Granularity,
    seed: DrawSeed = FIRST_SEED,
    is_known: Callable[[str], bool] = lambda structure_hash: False,
    functions: WholeFunctions | None = None,
) -> Recording:
    """Record the forward of a model on a batch. The model is left as it was.

    Random numbers between blocks, on which the forward may depend, are those that a replay with the same seed draws.
    `is_known` returns whether a structure hash is that of an earlier recording of this model with the same settings.
    `functions` are those that earlier recordings recorded as one call.
    """
    record = partial(_record_with_retries, model, args, kwargs, seed)
    with isolated(model), uncompiled():
        before = model_settings(model, granularity)
        first = record(_SEEDS[0], granularity, functions or WholeFunctions())
        difference = None
        if first.draws_in_python or not is_known(first.structure_hash):
            # The second forward is not isolated from the first, so that a counter that the first increased shows up.
            second = record(_SEEDS[1], first.granularity, first.functions)
            difference = _difference(first, second)
        after = model_settings(model, granularity)
        if difference is not None and not _caches_constants(model, first, second):
            # Is only the first forward different, or every one?
            third = record(_SEEDS[0], first.granularity, first.functions)
            if _difference(second, third) is None:
                raise CaptureError(
                    "the first forward initialises state that later ones use",
                    where=difference.values["where"],
                    **{name: difference.values[name] for name in ("line",) if name in difference.values},
                    hint="call the model once on this batch, and capture it then",
                )
            raise difference
    changed = (name for name in {**before, **after} if before.get(name) != after.get(name))
    return replace(first, volatile=frozenset(changed), constants=(), output_tensors=())


def _caches_constants(model: nn.Module, first: Recording, second: Recording) -> bool:
    """Whether the second forward differs from the first only in that it uses constants that the first computed.

    For example, tables of positions that the model, or a cached function, keeps. The first recording is then right:
    a replay computes them each time.
    """
    state = buffers_and_attributes(model)
    steps, outputs = second.record.steps, second.record.outputs
    names = (*states(outputs), *(name for step in steps for name in step.arg_states))
    keys = (*object_keys(outputs), *(key for step in steps for key in step.arg_keys))
    used = {*(id(state.get(name)) for name in names), *(id(second.live[key]) for key in keys)}
    if used.isdisjoint(map(id, first.constants)) or first.graph.updates != second.graph.updates:
        return False
    tensors, others = first.output_tensors, second.output_tensors
    return len(tensors) == len(others) and all(map(same_content, tensors, others))


def _record_with_retries(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    seed: DrawSeed,
    global_seed: int,
    granularity: Granularity,
    functions: WholeFunctions,
) -> Recording:
    """Record one forward; if the recorder finds that it must be recorded in another way, record it again.

    Each retry makes a change that is not undone, so this ends: a block is opened, a class registered as a container, a
    function recorded as one call, or such a function opened. `global_seed` seeds the global generators, which no call
    between blocks may draw from unseen.
    """
    skip_hooks = True
    functions = WholeFunctions([*functions.drawing], [*functions.reading], [*functions.opened])
    while True:
        blocks = granularity.blocks(model)
        try:
            with without_user_hooks(blocks.values() if skip_hooks else ()):
                recording = _record_once(model, args, kwargs, seed, global_seed, granularity, functions)
        except NewContainer:
            # Calls before this one were recorded with the object as a constant.
            continue
        except BypassedBlock as bypassed:
            granularity = granularity.open_siblings(model, bypassed.block)
        except NotReplayable as call:
            (functions.drawing if call.draws else functions.reading).append(call.function)
        except LeakyBlock as leak:
            if leak.block in blocks:
                granularity = granularity.open_like(model, leak.block)
            elif functions.reading:
                # A function that is one call leaks.
                named = (each for each in functions.reading if leak.block.endswith(f"/{short_name(each)}"))
                functions.open(next(named, functions.reading[-1]))
            else:
                raise CaptureError(
                    "a value enters or leaves a function other than through tensors in its arguments and results",
                    where=leak.block,
                    **({"made_in": leak.maker} if leak.maker else {}),
                    hint="keep the module that contains both as one block (basic_blocks)",
                ) from None
        except CaptureError:
            if functions.reading:
                # Perhaps because of a function that is one call.
                functions.open(functions.reading[-1])
            elif skip_hooks and has_user_hooks(blocks.values()):
                # The model may depend on its hooks, such as one that collects router logits for the loss.
                skip_hooks = False
            else:
                raise
        else:
            reading_functions, reading_modules = _find_readers(model, recording)
            if not reading_functions and not reading_modules:
                return recording
            functions.reading += reading_functions
            granularity = replace(granularity, basic_blocks=(*granularity.basic_blocks, *reading_modules))


def _find_readers(model: nn.Module, recording: Recording) -> tuple[list[Callable[..., Any]], list[str]]:
    """The code that reads activations into Python, such as one that matches boxes, and is better run as one call.

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
        elif isinstance(step, Guard) and reads_activations:
            scopes.add(step.scope)
    granularity = recording.granularity
    modules = [
        scope
        for scope in sorted(scopes - granularity.opened - {"", *granularity.basic_blocks})
        if next(model.get_submodule(scope).parameters(), None) is None
    ]
    return list(functions), modules


def _record_once(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    seed: DrawSeed,
    global_seed: int,
    granularity: Granularity,
    functions: WholeFunctions,
) -> Recording:
    """Run the forward under a Recorder, and build the recording from what it has recorded."""
    register_containers((args, kwargs))
    seed_generators(global_seed)
    recorder = Recorder(model, set(granularity.blocks(model)), seed, global_seed, functions)
    # Copies, as the model may write into its inputs. The same tensor given twice becomes two inputs: in another batch
    # they may differ.
    args, kwargs = transform(args, copy_leaf), transform(kwargs, copy_leaf)
    inputs = [name for name, leaf in named_inputs(model.forward, args, kwargs).items() if isinstance(leaf, Tensor)]
    generators = GeneratorStates(python_generators())
    try:
        output = _run_model(model, recorder, args, kwargs)
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
    outputs = recorder.writer.write(output, _OUTPUT)
    constants = _constant_values(model, recorder)
    _refuse_replaced_state(model, recorder, constants)
    steps = _without_unread_updates(recorder.steps, outputs)
    record = Record(tuple(inputs), steps, outputs, frozenset(recorder.sized))
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
        outputs_with_gradient=outputs_with_gradient(recorder.table.edges, graph.outputs),
        seed=seed,
        shared_draws=frozenset(name for name, note in notes if note.is_shared_draw),
        python_draws=frozenset(name for name, note in notes if note.draws_with_python),
        functions=functions,
        enclosing=recorder.enclosing,
        lines=dict(zip(map(id, steps), recorder.lines, strict=True)),
        size_reads=recorder.sized,
        draws_in_python=any(note.draws_with_python for _, note in notes) or generators.have_moved(),
        constants=recorder.table.values_named(constants),
        output_tensors=tuple(tensor.detach() for tensor in tensors_in(output)),
    )


def _constant_values(model: nn.Module, recorder: Recorder) -> set[str]:
    """The values that depend on no input, parameter, random number, or buffer that the forward writes."""
    found: set[str] = set()
    written = {name for note in recorder.notes.values() for name in note.written_state}
    # A buffer that the forward replaces, as a counter, has another value next time.
    kept = buffers_and_attributes(model)
    constant = {name for name, tensor in recorder.table.buffers.items() if kept.get(name) is tensor} - written
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
        # the call again in backward, where nothing seeds it.
        return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)

    blocks = set(recording.granularity.blocks(model))
    recorder = Recorder(model, blocks, seed, seed.step_seed, recording.functions, keep_saved_tensors)
    return _run_model(model, recorder, args, kwargs)


def _run_model(
    model: nn.Module,
    recorder: Recorder,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run the forward under the recorder; an error names the module in which it happened."""
    for name, leaf in named_inputs(model.forward, args, kwargs).items():
        if isinstance(leaf, Tensor):
            recorder.table.add(leaf, name)
            recorder.has_single_sample |= leaf.dim() > 0 and leaf.shape[0] == 1
    try:
        with (
            intercept_draws(recorder.function_drew, model),
            intercept_functions(recorder.function_drew, recorder.functions.drawing),
            intercept_functions(recorder.function_called, recorder.functions.reading),
            intercept_modules(model, recorder.module_called),
            intercept_autograd_functions(recorder.function_applied),
            intercept_scripted_functions(recorder.script_called),
            intercept_transforms(recorder.transform_called),
            recorder,
        ):
            try:
                return model(*args, **kwargs)
            finally:
                recorder.stop()
    except (BypassedBlock, LeakyBlock, NotReplayable, NewContainer, PenstockError):
        raise
    except Exception as error:
        failed, module = recorder.failure
        raise CaptureError(
            "the model cannot be run on this batch",
            module=(module if failed is error else "") or "the model",
            error=one_line(error),
            hint="call the model itself with this batch, and correct types and shapes of its arguments",
        ) from error


def _without_unread_updates(steps: Iterable[Call | Guard], outputs: Tree) -> tuple[Call | Guard, ...]:
    """The steps without the values of written buffers that nothing reads."""
    steps = tuple(steps)
    read = set(refs(outputs)).union(*(step.arg_values for step in steps))

    def reduced(call: Call) -> Call:
        updates = tuple((value, buffer) for value, buffer in call.results.updates if value in read)
        return replace(call, results=replace(call.results, updates=updates))

    return tuple(reduced(step) if isinstance(step, Call) else step for step in steps)


def _refuse_replaced_state(model: nn.Module, recorder: Recorder, constants: set[str]) -> None:
    """Refuse a forward that assigns a new tensor to a parameter or buffer between its blocks.

    A buffer that is not saved may be assigned a constant: the recording computes it in every replay.
    """
    # A plain tensor attribute that is assigned in every forward matters only if the forward reads the old one.
    read = {name for step in recorder.steps for name in step.arg_states}
    attributes = [(name, tensor) for name, tensor in buffers_and_attributes(model).items() if name in read]
    for name, tensor in (*model.named_parameters(), *model.named_buffers(), *attributes):
        value = recorder.table.name(tensor)
        path, _, attribute = name.rpartition(".")
        owner = model.get_submodule(path)
        is_saved = attribute in {*owner._parameters.keys(), *owner._buffers.keys()} - owner._non_persistent_buffers_set
        is_cached = value in constants and not is_saved
        if id(tensor) not in recorder.table.state and value is not None and not is_cached:
            raise CaptureError(
                "a parameter or buffer is replaced during the forward",
                name=name,
                hint="call the model once before, if only its first forward does so; else write in place (copy_, mul_ "
                "...), or keep its module whole (basic_blocks)",
            )


# Comparing two recordings


def _erased(tree: Tree) -> Any:
    """A tree with all numbers, also those in strings, replaced by "#"."""
    if isinstance(tree, Container):
        return tree.kind, tuple(map(_erased, tree.keys)), tuple(map(_erased, tree.items))
    if isinstance(tree, str):
        return _NUMBER.sub("#", tree)
    return "#" if type(tree) in (int, float) else tree


def _difference(first: Recording, second: Recording) -> CaptureError | None:
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
            where, line = (users[0].name, first.lines[id(users[0])]) if users else (_OUTPUT, "")
            return unknown_origin(value, where, line)
        if not _same_constant(value, second.live.get(key)):
            return _not_repeatable(key)
    # In tuples, which compare by identity first: NaN is not equal to itself.
    return _not_repeatable(_OUTPUT) if (first.record.outputs,) != (second.record.outputs,) else None


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
