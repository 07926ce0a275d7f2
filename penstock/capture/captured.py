"""A captured model: its graph, and a recording for every kind of batch so far."""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from penstock.capture.fingerprint import batch_signature, model_fingerprint
from penstock.capture.granularity import Granularity
from penstock.capture.guards import InputGuards
from penstock.capture.isolation import isolated, without_accumulation_hooks
from penstock.capture.recording import Recording, make_recording
from penstock.capture.replay import ArgumentReader, Getter, Replay, Values, WrapModule
from penstock.capture.tensor_table import device_of, storage_id
from penstock.errors import CaptureError
from penstock.ir import Graph, leaf_names, leaves, named_inputs, signature_of, transform

Batch = tuple[tuple[Any, ...], dict[str, Any]]


def capture(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    depth: int | None = None,
    basic_blocks: Sequence[str | type] = (),
) -> "Captured":
    """Record the model on one example batch. The model is left exactly as it was."""
    _check_model(model)
    _check_arguments(args, kwargs, depth, basic_blocks)
    captured = Captured(model, Granularity(depth, tuple(basic_blocks)), tuple(args), dict(kwargs or {}))
    captured.recording(*captured.example)
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
        """is entered around every recording, such as to gather sharded parameters"""
        self._granularity = granularity
        self._recordings: dict[tuple[Any, ...], list[Recording]] = {}
        """by batch signature and model fingerprint; several if they differ in guards"""
        self._first: Recording | None = None
        self._planned: Graph | None = None
        # By id(recording). The recording is kept as well, so that its id is not reused.
        self._guards: dict[int, tuple[Recording, InputGuards]] = {}
        self._output_getters: dict[int, tuple[Recording, Getter]] = {}

    @classmethod
    def planned(cls, model: nn.Module, graph: Graph) -> "Captured":
        """A model whose graph is known from a plan; the first batch is recorded when it arrives."""
        captured = cls(model, Granularity.of(graph), (), {})
        captured._planned = graph
        return captured

    @property
    def first(self) -> Recording:
        """The recording of the example batch."""
        assert self._first is not None
        return self._first

    @property
    def graph(self) -> Graph:
        """The graph of the example batch."""
        return self._planned or self.first.graph

    @property
    def is_meta(self) -> bool:
        """Whether the model is on the meta device and has no weights."""
        return device_of(self.model).type == "meta"

    @property
    def recorded_example(self) -> Batch:
        """The example as the model is called with it."""
        args, kwargs = self.example
        return args, without_cache(self.model, kwargs)

    def other_batch(self) -> Batch:
        """The example with its samples in another order, if the same recording holds for it; else the example."""
        has_rows = any(isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] > 1 for leaf in leaves(self.example))
        other = transform(self.example, _roll_rows if has_rows else _roll_last)
        try:
            found = self.recording(*other)
        except CaptureError:
            return self.example
        return other if found is self._first else self.example

    # Recordings

    @property
    def num_recordings(self) -> int:
        """How many recordings have been made."""
        return sum(map(len, self._recordings.values()))

    def recording(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recording:
        """The recording that holds for this batch; made now if there is none."""
        return self.recordings([(args, kwargs)])[0][0]

    def recordings(self, batches: Iterable[Batch]) -> list[tuple[Recording, Values]]:
        """The recording of each batch, made now if there is none, and the batch's tensors by name.

        For all microbatches of a step: the fingerprint of the model is computed once.
        """
        signature, fingerprint = signature_of(self.model.forward), self._fingerprint()
        found: list[tuple[Recording, Values]] = []
        candidates: dict[Any, list[Recording]] = {}
        for args, kwargs in batches:
            kwargs = without_cache(self.model, kwargs)
            given = named_inputs(self.model.forward, args, kwargs, signature)
            inputs = {name: leaf for name, leaf in given.items() if isinstance(leaf, Tensor)}
            batch = batch_signature(given)
            if batch not in candidates:
                candidates[batch] = self._recordings.get((batch, fingerprint), [])
            recording = next((one for one in candidates[batch] if self._holds(one, inputs)), None)
            if recording is None:
                recording = self._record(batch, args, kwargs)
                # Recording may open leaves and find volatile settings, which changes the fingerprint.
                fingerprint, candidates = self._fingerprint(), {}
            if recording.written_inputs:
                _refuse_shared_inputs(inputs, recording.written_inputs)
            found.append((recording, inputs))
        return found

    def _fingerprint(self, *more: Recording) -> Any:
        volatile = [one.volatile for known in (*self._recordings.values(), more) for one in known]
        return model_fingerprint(self.model, self._granularity, frozenset[str]().union(*volatile))

    def _record(self, signature: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recording:
        if torch.is_inference_mode_enabled():
            # Tensors made in inference mode have no version, so in-place writes would not be seen.
            raise CaptureError("a model cannot be recorded in inference mode", hint="torch.no_grad()")
        with self.recording_context():
            made = make_recording(self.model, args, kwargs, self._granularity)
        self._first = self._first or made
        # Leaves that had to be opened stay open, also for the fingerprint.
        self._granularity = made.granularity
        self._recordings.setdefault((signature, self._fingerprint(made)), []).append(made)
        return made

    def _holds(self, recording: Recording, inputs: Values) -> bool:
        """Whether all guards on the inputs hold for this batch."""
        if id(recording) not in self._guards:
            self._guards[id(recording)] = recording, InputGuards(recording, self.model)
        guards = self._guards[id(recording)][1]
        # On the meta device there are no values to read.
        return guards.always_hold or self.is_meta or guards.hold(inputs)

    # Parts of a recording

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Values:
        """The tensors of a batch by the names of the graph's inputs."""
        found = named_inputs(self.model.forward, args, without_cache(self.model, kwargs))
        return {name: leaf for name, leaf in found.items() if isinstance(leaf, Tensor)}

    def replay(
        self,
        recording: Recording,
        nodes: Collection[str],
        modules: nn.Module,
        wanted: Collection[str],
        wrap: WrapModule | None = None,
    ) -> Replay:
        """Some calls of a recording, prepared to run on modules with the same names; see `Replay`."""
        return Replay(recording, nodes, modules, wanted, self.model, wrap)

    def leaf_modules(self, nodes: Iterable[str], recording: Recording | None = None) -> list[str]:
        """The modules that some nodes, of the example or of another recording, are calls of."""
        graph = recording.graph if recording else self.graph
        return [graph[name].module for name in nodes if graph[name].is_leaf]

    def unused_leaves(self) -> list[str]:
        """The modules that would be leaves but that the example never called."""
        called = {node.module for node in self.graph.nodes if node.is_leaf}
        return [name for name in self._granularity.leaves(self.model) if name not in called]

    def output_names(self, recording: Recording) -> tuple[str, ...]:
        """The values among the leaves of the model's output, in their order; "" for a parameter or buffer."""
        return leaf_names(recording.record.outputs)

    def output(self, recording: Recording, values: Values) -> Any:
        """The model's output, built from the values in it."""
        if id(recording) not in self._output_getters:
            getter = ArgumentReader(recording, self.model).getter(recording.record.outputs)
            self._output_getters[id(recording)] = recording, getter
        return self._output_getters[id(recording)][1](values)

    # The unsplit model

    def whole(self, *args: Any, **kwargs: Any) -> Any:
        """Call the unsplit model as it is recorded."""
        return self.model(*args, **without_cache(self.model, kwargs))

    def isolated(self, seed: int | None = None, written: Collection[str] | None = None) -> AbstractContextManager[None]:
        """Restore at exit whatever the body changes in the model; see `penstock.capture.isolated`."""
        return isolated(self.model, seed, written)

    def without_accumulation_hooks(self) -> AbstractContextManager[None]:
        """Disable the user's post-accumulate-grad hooks in the body."""
        return without_accumulation_hooks(self.model)


def without_cache(model: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments with use_cache=False for a Hugging Face model that would return a key-value cache.

    The cache is an object that holds tensors, and only generation uses it.
    """
    config = getattr(model, "config", None)
    # Multimodal models have a configuration for text inside theirs.
    configs = (config, *getattr(config, "__dict__", {}).values())
    if not any(getattr(one, "use_cache", False) is True for one in configs) or kwargs.get("use_cache") is not None:
        return kwargs
    accepts = inspect.signature(model.forward).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepts.values())
    return {**kwargs, "use_cache": False} if takes_any or "use_cache" in accepts else kwargs


def _roll_rows(leaf: object) -> object:
    return leaf.roll(1, 0) if isinstance(leaf, Tensor) and leaf.dim() else leaf


def _roll_last(leaf: object) -> object:
    """For a single sample: roll along the last dimension that has more than one element."""
    if not isinstance(leaf, Tensor):
        return leaf
    last = [dim for dim in range(leaf.dim()) if leaf.shape[dim] > 1][-1:]
    return leaf.roll(1, last[0]) if last else leaf


# Checks


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise CaptureError("model must be a torch.nn.Module", given=type(model).__name__)
    if isinstance(getattr(model, "_orig_mod", None), nn.Module):
        raise CaptureError(
            "a model that is compiled as a whole cannot be captured",
            given=type(model).__name__,
            hint="capture the model that was compiled (model._orig_mod), and compile its blocks",
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError(
            "a model that is scripted as a whole cannot be captured",
            given=type(model).__name__,
            hint="capture the model before torch.jit.script; its blocks may be scripted",
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise CaptureError(
                "a parameter has no shape before the first forward",
                name=name,
                hint="call the model once on the batch, and then capture it",
            )


def _check_arguments(args: Any, kwargs: Any, depth: Any, basic_blocks: Any) -> None:
    if not isinstance(args, tuple | list):
        raise CaptureError(
            "args must be a tuple of the model's positional arguments",
            given=type(args).__name__,
            hint="capture(model, (batch,)), or capture(model, kwargs={...}) for arguments by name",
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise CaptureError("kwargs must be a dict of the model's keyword arguments", given=type(kwargs).__name__)
    if depth is not None and not (type(depth) is int and depth >= 1):
        raise CaptureError("depth must be 1 or more: the model itself is depth 0", depth=repr(depth))
    if isinstance(basic_blocks, str) or not isinstance(basic_blocks, Collection):
        raise CaptureError(
            "basic_blocks must be a list of module names and classes",
            given=getattr(basic_blocks, "__name__", repr(basic_blocks)),
            hint="basic_blocks=[...]",
        )
    for block in basic_blocks:
        if not isinstance(block, str | type):
            raise CaptureError(
                "a basic block must be the name of a module or a class",
                basic_block=repr(block).partition("\n")[0],
                hint="a name of named_modules(), or the class of the module",
            )


def _refuse_shared_inputs(inputs: Mapping[str, Tensor], written: Collection[str]) -> None:
    """Refuse inputs that overlap one that the model writes into: every stage gets its own copies."""
    for one, other in combinations(inputs, 2):
        if (one in written or other in written) and _overlap(inputs[one], inputs[other]):
            raise CaptureError(
                "two inputs share memory, and the model writes into one of them",
                inputs=f"{one}, {other}",
                written=one if one in written else other,
                hint="give the model a copy (clone) of one of them",
            )


def _overlap(one: Tensor, other: Tensor) -> bool:
    if storage_id(one) != storage_id(other):
        return False
    (_, first_end), (second, _) = sorted(map(_byte_range, (one, other)))
    return second < first_end


def _byte_range(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the end behind its last."""
    start = int(tensor.storage_offset())
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    length = int(1 + sum((size - 1) * stride for size, stride in steps)) if tensor.numel() else 0
    return start * tensor.element_size(), (start + length) * tensor.element_size()
