"""A captured model: its graph, and a recording for every kind of batch so far."""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from penstock.capture.arguments import ArgumentReader, Getter, Values
from penstock.capture.fingerprint import Fingerprinter, batch_signature
from penstock.capture.functions import WholeFunctions
from penstock.capture.granularity import Granularity, outer_modules
from penstock.capture.guards import InputGuards
from penstock.capture.lru_cache import LruCache
from penstock.capture.objects import register_containers
from penstock.capture.random_draws import DrawSeed
from penstock.capture.record_forward import make_recording, run_with_draws
from penstock.capture.recording import Recording
from penstock.capture.tensors import device_of, storage_id
from penstock.errors import CaptureError
from penstock.ir import Graph, leaf_names, leaves, map_leaves, named_inputs, num_registered, signature_of

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""positional and keyword arguments of the model"""
_MAX_EXAMPLE_SEEDS = 8
"""with how many seeds the example is recorded, if random numbers decide which blocks are called"""


class NamedBatch(NamedTuple):
    """A batch with everything that decides which recording holds for it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    """as the model is called with them"""
    inputs: Values
    """the tensors among the arguments, by name"""
    signature: Any
    """equal for batches of the same structure, shapes and dtypes"""
    seed: DrawSeed


def capture(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    granularity: Granularity = Granularity(),  # noqa: B008
) -> "Captured":
    """Record the model on one example batch. The model is left exactly as it was."""
    check_model(model)
    _check_arguments(args, kwargs)
    captured = Captured(model, granularity, tuple(args), dict(kwargs or {}))
    captured.record_example()
    return captured


class Captured:
    """A model that can be replayed call by call; `graph` is that of the example batch.

    Another batch reuses a recording if its signature, the model's fingerprint and all guards on the inputs agree, and
    is recorded otherwise. Every rank decides this from the same inputs, so no communication is needed.
    """

    def __init__(
        self, model: nn.Module, granularity: Granularity, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.model = model
        self.example = (args, kwargs)
        self.recording_context: Callable[[], AbstractContextManager[Any]] = nullcontext
        """makes a context for every recording, for example one that gathers sharded parameters"""
        self._granularity = granularity
        self._fingerprinter = Fingerprinter(model)
        self._functions = WholeFunctions()
        """functions of the user that are recorded as one call"""
        self._recordings: dict[tuple[Any, ...], list[Recording]] = {}
        """by batch signature and model fingerprint; several if they differ in guards"""
        self._last_used: LruCache[Recording, tuple[tuple[Any, ...], Recording]] = LruCache()
        """all of these, each with its key, in the order of their last use"""
        self._known_hashes: LruCache[tuple[Any, str], None] = LruCache()
        """model fingerprints and structure hashes of recordings: another with the same pair needs one forward only"""
        self._volatile: frozenset[str] = frozenset()
        """settings that the forward itself changes"""
        self.example_recording: Recording | None = None
        """the recording of the example batch; without an example, that of the first batch, None before it"""
        self.seed = 0
        """of the example's random numbers"""
        self._planned_graph: Graph | None = None
        """the graph of a plan, from which the model is captured without an example"""
        self._guards: LruCache[Recording, InputGuards] = LruCache()
        self._output_getters: LruCache[Recording, Getter] = LruCache()

    @classmethod
    def planned(cls, model: nn.Module, graph: Graph, granularity: Granularity = Granularity()) -> "Captured":  # noqa: B008
        """A model whose graph is known from a plan; the first batch is recorded when it arrives.

        It is opened as far as the graph is, unless `granularity` differs from the default.
        """
        _check_modules(model, graph)
        captured = cls(model, Granularity.of(graph).merged(model, granularity), (), {})
        captured._planned_graph = graph
        return captured

    @property
    def graph(self) -> Graph:
        """The graph of the example batch."""
        return self._planned_graph or self.example_recording.graph

    @property
    def is_meta(self) -> bool:
        """Whether the model is on the meta device and has no weights."""
        return device_of(self.model).type == "meta"

    @property
    def recorded_example(self) -> Arguments:
        """The example as the model is called with it."""
        args, kwargs = self.example
        return args, without_cache(self.model, kwargs)

    def other_batch(self) -> Arguments:
        """The example with its samples in another order, if the same recording holds for it; else the example."""
        has_rows = any(isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] > 1 for leaf in leaves(self.example))

        def rolled(leaf: object) -> object:
            """Rolled along the first dimension; a single sample along the last one that has more than one element."""
            dims = range(leaf.dim()) if isinstance(leaf, Tensor) else ()
            chosen = dims[:1] if has_rows else [dim for dim in dims if leaf.shape[dim] > 1][-1:]
            return leaf.roll(1, chosen[0]) if chosen else leaf

        other = map_leaves(self.example, rolled)
        try:
            recording = self.recording(*other)
        except CaptureError:
            return self.example
        return other if recording is self.example_recording else self.example

    # Recordings

    @property
    def num_recordings(self) -> int:
        """The number of recordings that are kept."""
        return len(self._last_used)

    def record_example(self) -> None:
        """Record the example. If random numbers decide which blocks are called, with draws that call the most."""
        self.recording(*self.example)
        best, best_seed = self.example_recording, self.seed
        if self._guards_of(best).depend_on_draws:
            for seed in range(1, _MAX_EXAMPLE_SEEDS):
                found = self.recording(*self.example, seed)
                if len(found.graph.nodes) > len(best.graph.nodes):
                    best, best_seed = found, seed
        self.example_recording, self.seed = best, best_seed

    def recording(self, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int | None = None) -> Recording:
        """The recording that holds for this batch; recorded now if this batch is the first of its kind."""
        register_containers((args, kwargs))
        return self.recordings([(args, kwargs)], seed)[0][0]

    def num_new(self, batches: Sequence[Arguments], seed: int) -> int:
        """The number of recordings that `recordings` would make, as far as signatures show."""
        fingerprint, new = self._fingerprint(), set()
        for batch in self._named_batches(batches, seed, range(len(batches))):
            known = self._recordings.get((batch.signature, fingerprint), [])
            if not any(self._holds(recording, batch) for recording in known):
                new.add(batch.signature)
        return len(new)

    def recordings(
        self,
        batches: Sequence[Arguments],
        seed: int | None = None,
        min_recordings: int = 0,
        kinds: Sequence[object] | None = None,
    ) -> list[tuple[Recording, Values]]:
        """The recording of each microbatch of a step, and its tensors by name; records the model if no recording holds.

        Batches of equal `kinds` differ only in the values of tensors; by default all kinds differ. The recordings hold
        for the random numbers of the step's seed; without one, for those of the example. Objects in the batches that
        hold tensors must have been registered as containers, as `BatchSplitter` does. The fingerprint of the model is
        computed once. The model is recorded at least `min_recordings` times: its modules may communicate with other
        processes that record it.
        """
        seed = self.seed if seed is None else seed
        fingerprint, num_missing = self._fingerprint(), min_recordings
        results: list[tuple[Recording, Values]] = []
        # By signature, because the fingerprint has entries for every module: hashing it takes longer than all the rest.
        candidates: dict[Any, list[Recording]] = {}
        # Microbatches usually have the same signature object. If the recording of the last one holds for all batches of
        # its signature, nothing else is compared.
        last_signature: Any = None
        last_recording: Recording | None = None
        for batch in self._named_batches(batches, seed, kinds or range(len(batches))):
            if last_recording is not None and batch.signature is last_signature:
                results.append((last_recording, batch.inputs))
                continue
            if batch.signature not in candidates:
                candidates[batch.signature] = self._recordings.get((batch.signature, fingerprint), [])
            holding = (candidate for candidate in candidates[batch.signature] if self._holds(candidate, batch))
            recording = next(holding, None)
            # Candidates are tried in order, so only the first may be reused without checking any guards.
            is_first = recording is not None and recording is candidates[batch.signature][0]
            if recording is None:
                num_missing -= 1
                # Recording may open blocks and find volatile settings, which changes the fingerprint.
                recording, fingerprint = self._record(batch, fingerprint)
                candidates = {}
            self._last_used.find(recording)  # Marks it as used.
            if recording.written_inputs:
                _refuse_shared_inputs(batch.inputs, recording.written_inputs)
            always_holds = is_first and not recording.written_inputs and self._guards_of(recording).always_hold
            last_signature, last_recording = batch.signature, recording if always_holds else None
            results.append((recording, batch.inputs))
        if num_missing > 0:
            self.record_again(batches[0], seed, num_missing)
        return results

    def _named_batches(self, batches: Sequence[Arguments], seed: int, kinds: Sequence[object]) -> Iterator[NamedBatch]:
        """The microbatches of a step. Names and signatures are found once for microbatches of one kind."""
        parameters = signature_of(self.model.forward)
        # Once for all microbatches: it looks at the configuration of every module.
        no_cache = without_cache(self.model, {}, self._fingerprinter.modules.values())
        last_kind, signature = object(), None
        # Names and positions of the arguments of the last kind, if all of them are different tensors.
        positions: list[tuple[str, int]] | None = None
        for index, ((args, kwargs), kind) in enumerate(zip(batches, kinds, strict=True)):
            if no_cache and kwargs.get("use_cache") is None:
                kwargs = {**kwargs, **no_cache}
            given = (*args, *kwargs.values())
            if kind == last_kind and positions is not None:
                inputs = {name: given[position] for name, position in positions}
            else:
                named = named_inputs(self.model.forward, args, kwargs, parameters)
                inputs = {name: leaf for name, leaf in named.items() if isinstance(leaf, Tensor)}
                if kind != last_kind:
                    last_kind, signature = kind, batch_signature(named)
                    by_id = {id(value): position for position, value in enumerate(given) if isinstance(value, Tensor)}
                    is_plain = len(by_id) == len(given)
                    positions = [(name, by_id[id(leaf)]) for name, leaf in inputs.items()] if is_plain else None
            yield NamedBatch(args, kwargs, inputs, signature, DrawSeed(seed, index))

    def record_again(self, batch: Arguments, seed: int, count: int) -> None:
        """Record a batch that is known `count` times, for other processes that its modules communicate with."""
        for _ in range(count):
            args, kwargs = batch
            self._make_recording(self._fingerprint(), args, without_cache(self.model, kwargs), DrawSeed(seed, 0))

    def _fingerprint(self) -> Any:
        settings = self._fingerprinter.compute(self._granularity, self._volatile)
        # A class that has become a container since a recording is taken apart in its calls from now on.
        return settings, num_registered()

    def _record(self, batch: NamedBatch, fingerprint: Any) -> tuple[Recording, Any]:
        """Record a batch and keep the recording; returns it and the fingerprint with which it was kept."""
        if torch.is_inference_mode_enabled():
            # Tensors made in inference mode have no version, so in-place writes would not be seen.
            raise CaptureError("a model cannot be recorded in inference mode", hint="torch.no_grad()")
        made, volatile = self._make_recording(fingerprint, batch.args, batch.kwargs, batch.seed)
        self.example_recording = self.example_recording or made
        # Blocks that had to be opened stay open, also for the fingerprint.
        self._granularity, self._functions = made.granularity, made.functions
        self._fingerprinter.find_modules(made.granularity)
        self._volatile |= volatile
        fingerprint = self._fingerprint()
        key = (batch.signature, fingerprint)
        self._recordings.setdefault(key, []).append(made)
        self._known_hashes.put((fingerprint, made.structure_hash), None)
        for evicted_key, evicted in self._last_used.put(made, (key, made)):
            self._recordings[evicted_key].remove(evicted)
            if not self._recordings[evicted_key]:
                del self._recordings[evicted_key]
        return made, fingerprint

    def _make_recording(
        self, fingerprint: Any, args: tuple[Any, ...], kwargs: dict[str, Any], seed: DrawSeed
    ) -> tuple[Recording, frozenset[str]]:
        """A new recording, and the settings that the forward itself changes."""

        def is_known(structure_hash: str) -> bool:
            return (fingerprint, structure_hash) in self._known_hashes

        def make(granularity: Granularity) -> tuple[Recording, frozenset[str]]:
            return make_recording(self.model, args, kwargs, granularity, seed, is_known, self._functions)

        with self.recording_context():
            try:
                return make(self._granularity)
            except CaptureError as error:
                # Only for the example: later the stages exist, and no other module can be kept whole.
                block = None if self.example_recording else self._block_that_records(error, make)
                if block is None:
                    raise
                hint = f'basic_blocks=["{block}"], which keeps that module whole'
                raise CaptureError(error.problem, hint=hint, report=error.report, **error.values) from error

    def _block_that_records(self, error: CaptureError, make: Callable[[Granularity], object]) -> str | None:
        """The smallest module around the place of an error such that the model can be recorded with it as one block."""
        if "(basic_blocks)" not in error.hint:
            return None
        name, where = str(error.values.get("name", "")), str(error.values.get("where", ""))
        innermost = name.rpartition(".")[0] or where.partition("/")[0]
        modules = dict(self.model.named_modules())
        for block in (innermost, *reversed(outer_modules(innermost))):
            # "" is the model itself, which cannot be a block.
            if not block or block not in modules:
                continue
            with suppress(Exception):
                make(self._granularity.merged(self.model, Granularity(basic_blocks=(block,))))
                return block
        return None

    def _holds(self, recording: Recording, batch: NamedBatch) -> bool:
        """Whether all guards on inputs and random numbers hold for this batch."""
        guards = self._guards_of(recording)
        if guards.always_hold:
            return True
        # On the meta device there are no values to read, except random numbers that are drawn on the CPU.
        return (self.is_meta and not guards.depend_on_draws) or guards.hold(batch.inputs, batch.seed)

    def _guards_of(self, recording: Recording) -> InputGuards:
        return self._guards.get_or_make(recording, lambda: InputGuards(recording, self.model))

    # Parts of a recording

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Values:
        """The tensors of a batch by the names of the graph's inputs."""
        named = named_inputs(self.model.forward, args, without_cache(self.model, kwargs))
        return {name: leaf for name, leaf in named.items() if isinstance(leaf, Tensor)}

    def uncalled_blocks(self) -> list[str]:
        """The modules that would be blocks but that the example never called."""
        called = {node.module for node in self.graph.nodes if node.is_block}
        granularity = Granularity.of(self._planned_graph) if self._planned_graph else self._granularity
        return [name for name in granularity.blocks(self.model) if name not in called]

    def output_names(self, recording: Recording) -> tuple[str, ...]:
        """The values among the leaves of the model's output, in their order; "" for a parameter or buffer."""
        return leaf_names(recording.record.outputs)

    def output(self, recording: Recording, values: Values) -> Any:
        """The model's output, built from the values in it."""

        def make() -> Getter:
            return ArgumentReader(recording.live, recording.device, self.model).getter(recording.record.outputs)

        return self._output_getters.get_or_make(recording, make)(values)

    # The unsplit model

    def run_unsplit(self, *args: Any, **kwargs: Any) -> Any:
        """Call the unsplit model as it is recorded."""
        return self.model(*args, **without_cache(self.model, kwargs))

    def run_unsplit_with_draws(self, seed: DrawSeed, /, *args: Any, **kwargs: Any) -> Any:
        """Call the unsplit model with the random numbers that its stages draw with this seed."""
        kwargs = without_cache(self.model, kwargs)
        return run_with_draws(self.model, args, kwargs, self.recording(args, kwargs, seed.step_seed), seed)


def without_cache(
    model: nn.Module, kwargs: dict[str, Any], modules: Iterable[nn.Module] | None = None
) -> dict[str, Any]:
    """The keyword arguments with use_cache=False for a Hugging Face model that would return a key-value cache.

    The cache is an object that holds tensors, and only generation uses it. `modules`: all of the model, if known.
    """
    # The decoder of an encoder-decoder has a configuration of its own, and that of a multimodal model has one for text.
    inner = [vars(module).get("config") for module in modules or model.modules()]
    attributes = (getattr(model, "config", None), *inner)
    distinct = {id(config): config for config in attributes if config is not None}
    configs = [part for config in distinct.values() for part in (config, *getattr(config, "__dict__", {}).values())]
    uses_cache = any(getattr(config, "use_cache", False) is True for config in configs)
    if not uses_cache or kwargs.get("use_cache") is not None:
        return kwargs
    accepts = inspect.signature(model.forward).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepts.values())
    return {**kwargs, "use_cache": False} if takes_any or "use_cache" in accepts else kwargs


# Checks


def check_model(model: Any) -> None:
    """Refuse what cannot be recorded at all."""
    if not isinstance(model, nn.Module):
        raise CaptureError("model must be a torch.nn.Module", got=type(model).__name__)
    if isinstance(getattr(model, "_orig_mod", None), nn.Module):
        raise CaptureError(
            "a model that is compiled as a whole cannot be captured",
            got=type(model).__name__,
            hint="capture the model that was compiled (model._orig_mod), and compile its blocks",
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError(
            "a model that is scripted as a whole cannot be captured",
            got=type(model).__name__,
            hint="capture the model before torch.jit.script; its blocks may be scripted",
        )
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise CaptureError(
            "a model that is wrapped for data parallelism cannot be captured",
            got=type(model).__name__,
            hint='model.module; replicas of a pipeline are the axis "dp" of its mesh',
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise CaptureError(
                "a parameter has no shape before the first forward",
                name=name,
                hint="call the model once on the batch, and then capture it",
            )


def _check_arguments(args: Any, kwargs: Any) -> None:
    if not isinstance(args, tuple | list):
        raise CaptureError(
            "args must be a tuple of the model's positional arguments",
            got=type(args).__name__,
            hint="capture(model, (batch,)), or capture(model, kwargs={...}) for arguments by name",
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise CaptureError("kwargs must be a dict of the model's keyword arguments", got=type(kwargs).__name__)


def _refuse_shared_inputs(inputs: Mapping[str, Tensor], written: Collection[str]) -> None:
    """Refuse inputs that overlap one that the model writes into: every stage gets its own copies."""
    for first, second in combinations(inputs, 2):
        if (first in written or second in written) and _may_overlap(inputs[first], inputs[second]):
            raise CaptureError(
                "two inputs share memory, and the model writes into one of them",
                inputs=f"{first}, {second}",
                written=first if first in written else second,
                hint="give the model a copy (clone) of one of them",
            )


def _may_overlap(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors may have bytes in common. Strided ones that interleave without common bytes count."""
    if storage_id(left) != storage_id(right):
        return False
    ranges = []
    for tensor in (left, right):
        start = int(tensor.storage_offset())
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        length = int(1 + sum((size - 1) * stride for size, stride in steps)) if tensor.numel() else 0
        ranges.append((start * tensor.element_size(), (start + length) * tensor.element_size()))
    (_, first_end), (second_start, _) = sorted(ranges)
    return second_start < first_end


def _check_modules(model: nn.Module, graph: Graph) -> None:
    """Refuse a graph that names modules which the model does not have, before a name is used to find one.

    The names may come from a file: `get_submodule` would look up any attribute. A graph with other parameters is of
    another model, and is refused later with their names.
    """
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if not {name for node in graph.nodes for name in node.parameters} <= parameters:
        return
    for node in graph.nodes:
        module: nn.Module | None = model
        for word in node.module.split(".") if node.module else ():
            module = None if module is None else module._modules.get(word)
        if module is None:
            hint = "the plan of this model, unchanged"
            problem = "the graph names a module that the model does not have"
            raise CaptureError(problem, node=node.name, module=repr(node.module)[:100], hint=hint)
