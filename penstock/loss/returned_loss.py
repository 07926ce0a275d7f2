"""Evaluates the loss that a model returns on parts of a batch, without running the blocks of the model.

The model's own Python runs, but blocks return noise of the recorded shapes: an evaluation costs only the few functions
between the blocks. The gradients that `probe.py` compares are those with respect to the noise. The same runs show where
samples interact before a block (`interactions.py`).
"""

import math
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.batches import Microbatch
from penstock.capture import (
    Captured,
    Recording,
    copy_leaf,
    dtype_named,
    hooks_of_model,
    intercept_modules,
    isolated,
    tensors_in,
    uncompiled,
    without_cache,
    without_user_hooks,
)
from penstock.ir import Call, Container, Graph, Parts, Ref, Tree, copy_into, leaves, map_leaves, unflatten_one_level
from penstock.loss.add_loss import collect_added
from penstock.loss.find_losses import SINGLE, losses_of
from penstock.loss.interactions import InputComparison
from penstock.loss.probe import ConstantRandomness, Evaluate, Evaluation, FunctionTracker, ProbeError
from penstock.loss.samples import SMALL_SCALE, SampleRange, choose_parts


class ModelLoss:
    """The loss that a model returns, evaluated on parts of a batch without running its blocks."""

    def __init__(
        self,
        captured: Captured,
        recording: Recording,
        microbatches: Sequence[Microbatch],
        remote_parameters: Mapping[int, str],
        name: str = SINGLE,
        recorded: int = 0,
    ) -> None:
        """`recording` is that of the microbatch with index `recorded`.

        `remote_parameters`: names of the parameters that are trained on other ranks, by their id. `name` is that of the
        loss, if there are several.
        """
        self._loss_name = name
        self.captured, self.recording, self.microbatches = captured, recording, microbatches
        self.recorded, self.recorded_size = recorded, microbatches[recorded].size
        self.mixed_inputs: list[str] | None = None
        """the blocks whose inputs depend on other samples too, once the loss was evaluated"""
        self._remote = set(remote_parameters.values())
        self.block_names = {id(module): name for name, module in recording.granularity.blocks(captured.model).items()}
        """by the id of the module"""
        self.replaced: dict[str, list[Call]] = {}
        """the recorded calls of the blocks that noise replaces"""
        for call in recording.record.steps:
            if not isinstance(call, Call) or not call.is_module:
                continue
            # Blocks without parameters are cheap, and one that returns only scalars may compute the loss: these run.
            has_parameters = any(True for _ in captured.model.get_submodule(call.target).parameters())
            if has_parameters and any(recording.graph.spec(name).shape for name in call.results.values if name):
                self.replaced.setdefault(call.target, []).append(call)

    @property
    def sample_size(self) -> int:
        """The number of entries that the largest result of a block has for each sample."""
        calls = [call for calls in self.replaced.values() for call in calls]
        shapes = [self.recording.graph.spec(name).shape for call in calls for name in call.results.values if name]
        return max((math.prod(shape) for shape in shapes), default=1) // self.recorded_size

    def tensors(self, microbatch: Microbatch) -> dict[str, Tensor]:
        """The tensors of the inputs, by name."""
        return microbatch.countable(self.captured.inputs(microbatch.args, microbatch.kwargs))

    @contextmanager
    def evaluator(self, parts: Sequence[SampleRange], draw: int) -> Iterator[Evaluate]:
        """Evaluate with noise that differs in every `draw`."""
        if sum(part.length for part in parts) == self.recorded_size:
            # No dimension would differ from the recorded ones, so that none would be known to hold the samples.
            raise ProbeError("the parts have as many samples together as were recorded")
        noise = self.noise(parts, draw)

        def evaluate(chosen: Sequence[int]) -> Evaluation:
            run = self.run(noise, chosen)
            loss = losses_of(run.output)[self._loss_name]
            return Evaluation.of(loss, noise.leaves(), noise.shared(), run.dtype)

        with self.isolated():
            yield evaluate
        self.mixed_inputs = list(noise.comparison.mixed_inputs)

    def noise(self, parts: Sequence[SampleRange], draw: int, small_scale: float = SMALL_SCALE) -> "Noise":
        """Results of the blocks for some parts of the batch; every other part has the `small_scale`."""
        first = next(self.captured.model.parameters(), None)
        device = torch.device("cpu") if first is None else first.device
        return Noise(self.recording.graph, self.microbatches, self.recorded_size, parts, draw, device, small_scale)

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Restore everything that the model changes inside the context, and disable the user's hooks.

        Hooks that pass values to the model's code stay: they are recorded.
        """
        model = self.captured.model
        without_hooks = without_user_hooks([model], hooks_of_model(model))
        with isolated(model, None, ()), uncompiled(), without_hooks, torch.enable_grad():
            yield

    def run(self, noise: "Noise", chosen: Sequence[int], live: Collection[str] = ()) -> "NoisyResult":
        """Run the model for some parts together. Blocks in `live` run too, for the losses that they add."""
        forward, tracker = _NoisyForward(self, noise, chosen, live), FunctionTracker()
        added: list[tuple[str, Tensor]] = []
        state = self.captured.model.state_dict(keep_vars=True)
        written = {name for update in self.recording.graph.updates for name in update.names} & state.keys()
        before = {name: state[name].detach().clone() for name in written}
        arguments = map_leaves(noise.batch(chosen), copy_leaf)
        is_random = any(node.is_random for node in self.recording.graph.nodes)
        with (
            intercept_modules(self.captured.model, forward.call_module),
            tracker,
            collect_added(lambda loss: added.append((forward.running or "", loss.value))),
            ConstantRandomness() if is_random else nullcontext(),
        ):
            output = self._call_model(*arguments)
        # The next run must begin with the same state.
        for name, content in before.items():
            state[name].data.copy_(content)
        return NoisyResult(output, tuple(added), tracker.dtype)

    def _call_model(self, args: Any, kwargs: Any) -> Any:
        # Parameters of other ranks may have no values here: those that are used between blocks are replaced by ones.
        model = self.captured.model
        used = {name for node in self.recording.graph.nodes if not node.is_block for name in node.parameters}
        missing = {name: p for name in used & self._remote if not (p := model.get_parameter(name)).isfinite().all()}
        if not missing:
            return self.captured.run_unsplit(*args, **kwargs)
        made = {name: torch.ones(p.shape, dtype=p.dtype, device=p.device) for name, p in missing.items()}
        return torch.func.functional_call(model, made, args, without_cache(model, kwargs))

    def find_mixed_inputs(self, with_outputs: bool) -> list[str]:
        """The blocks whose inputs depend on other samples too; `with_outputs` checks the outputs of the model as well.

        Found by running the Python between the blocks for some samples together and in parts. Empty if that fails, as
        it does in models whose control flow depends on the values of activations.
        """
        graph = self.recording.graph
        if all(node.is_block or node.from_inputs for node in graph.nodes):
            return []
        sizes = [microbatch.size for microbatch in self.microbatches]
        # The recorded microbatch is one of them: together they must be more samples than were recorded.
        parts = choose_parts(sizes, self.sample_size, step_number=self.recorded)
        noise = self.noise(parts, 0)
        try:
            with self.isolated():
                for chosen in ([*range(len(parts))], *([number] for number in range(len(parts)))):
                    run = self.run(noise, chosen)
                    if with_outputs:
                        outputs = zip(_recorded_leaves(self.recording.record.outputs), leaves(run.output), strict=True)
                        noise.comparison.compare("the outputs", list(outputs), chosen)
        except Exception:  # the user's model may raise anything
            return []
        return list(noise.comparison.mixed_inputs)


class Noise:
    """Random results of blocks for the parts of a batch, drawn again from the same seeds in every run, not kept."""

    def __init__(
        self,
        graph: Graph,
        microbatches: Sequence[Microbatch],
        recorded_size: int,
        parts: Sequence[SampleRange],
        draw: int,
        device: torch.device,
        small_scale: float = SMALL_SCALE,
    ) -> None:
        """`graph` is that of a microbatch of `recorded_size` samples. The noise differs in every `draw`."""
        self._graph, self._draw, self._device, self._small_scale = graph, draw, device, small_scale
        self._sizes, self._recorded_size = [part.length for part in parts], recorded_size
        self._parts = [microbatches[part.microbatch].take(part.start, part.length) for part in parts]
        self._sample_dims: dict[str, tuple[int | None, tuple[int, ...]]] = {}
        """by value the dimension that holds the samples, and how long it is for each part"""
        self._shapes: dict[str, tuple[int, ...]] = {}
        """by value that a block was run to see: its shape for all parts together"""
        self._leaves: dict[tuple[int, str], weakref.ref[Tensor]] = {}
        """the noise of the current run by part, or -1 for noise that all parts share, and value"""
        self.unreplaced: set[str] = set()
        """blocks that run, because noise cannot replace the experts that a router chose, or packed sequences"""
        self.comparison = InputComparison(self._graph, self._sizes, self._recorded_size)

    def batch(self, chosen: Sequence[int]) -> Any:
        """The arguments of the model for some parts together. Called at the start of every run."""
        self._leaves.clear()
        self.comparison.start_run()
        joined = Microbatch.join([self._parts[number] for number in chosen])
        return joined.args, joined.kwargs

    def leaves(self) -> dict[tuple[int, str], Tensor]:
        """The noise of this run that is still in use, by part and value; without noise that no loss depends on."""
        live = {key: leaf() for key, leaf in self._leaves.items() if key[0] >= 0}
        return {key: leaf for key, leaf in live.items() if leaf is not None}

    def shared(self) -> dict[str, Tensor]:
        """The noise of blocks that do not depend on the samples, such as embeddings of positions."""
        live = {name: leaf() for (part, name), leaf in self._leaves.items() if part < 0}
        return {name: leaf for name, leaf in live.items() if leaf is not None}

    def is_ambiguous(self, values: Collection[str], changed: Mapping[int, int], unchanged: Collection[int]) -> bool:
        """Whether the lengths of a value's dimensions do not determine which of them holds the samples.

        Examples: a state of shape (directions, samples, features) with as many directions as samples, and embeddings of
        positions if a sequence is as long as the microbatch has samples. `changed` maps the lengths of dimensions in
        the recorded inputs of the block to the current lengths; the `unchanged` ones are as recorded.
        """
        unknown = [self._graph.spec(value).shape for value in values if value not in self._sample_dims]
        fitting = [[length for length in shape if length in changed] for shape in unknown]
        return any(len(lengths) > 1 or not {*lengths}.isdisjoint(unchanged) for lengths in fitting)

    def set_shapes(self, call: Call, result: Any) -> None:
        """Find the dimensions of samples from the result of a block for all parts together."""
        for name, tensor in zip(call.results.values, tensors_in(result), strict=False):
            if tensor.dim() == len(self._graph.spec(name).shape):
                self._shapes[name] = tuple(tensor.shape)

    def draw(self, value: str, changed: Mapping[int, int], chosen: Sequence[int]) -> Tensor:
        """The noise of a value for some parts together.

        `changed` maps the lengths of dimensions in the recorded inputs of the block to the current lengths.
        """
        shape = self._graph.spec(value).shape
        if value not in self._sample_dims:
            # The first run is for all parts together, more samples than were recorded: their dimension has grown.
            now = self._shapes.get(value) or tuple(changed.get(length, length) for length in shape)
            dim = next((index for index, length in enumerate(shape) if length != now[index]), None)
            total = 0 if dim is None else now[dim]
            if dim is not None and total * self._recorded_size != shape[dim] * sum(self._sizes):
                raise ProbeError("a block returns a tensor without a dimension of samples, as a packed sequence is")
            self._sample_dims[value] = dim, tuple(total // sum(self._sizes) * size for size in self._sizes)
        dim, lengths = self._sample_dims[value]
        if dim is None:
            return self._draw_leaf(value, -1, shape).clone()
        shapes = {number: (*shape[:dim], lengths[number], *shape[dim + 1 :]) for number in chosen}
        # Always a copy: the model may write into it.
        drawn = [self._draw_leaf(value, number, part_shape) for number, part_shape in shapes.items()]
        return torch.cat(drawn, dim).clone()

    def _draw_leaf(self, value: str, part: int, shape: tuple[int, ...]) -> Tensor:
        dtype = dtype_named(self._graph.spec(value).dtype)
        if not dtype.is_floating_point:
            raise ProbeError("a block returns integers or complex numbers")
        # The seed depends on draw, value and part only, so that every run of a draw has the same noise.
        seed = (self._draw * 10_000 + list(self._sample_dims).index(value)) * 100 + part + 1
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        scale = self._small_scale if (self._draw + part) % 2 else 1.0
        leaf = (noise * scale).to(self._device, dtype).requires_grad_()
        self._leaves[part, value] = weakref.ref(leaf)
        return leaf


class _NoisyForward:
    """One forward of a model in which noise takes the place of the results of its blocks."""

    def __init__(self, model: ModelLoss, noise: Noise, chosen: Sequence[int], live: Collection[str]) -> None:
        self._model, self._noise, self._chosen, self._live = model, noise, chosen, live
        self._num_calls: Counter[str] = Counter()
        self.running: str | None = None
        """the block that is running, if any: modules inside it are not blocks, even if their module object is one"""

    def call_module(self, module: nn.Module, original: Any, args: Any, kwargs: Any) -> Any:
        """Called for every module in place of its call."""
        name, noise = self._model.block_names.get(id(module)), self._noise
        if self.running is not None or name is None:
            return original(module, *args, **kwargs)

        def run_block() -> Any:
            self.running = name
            try:
                return original(module, *args, **kwargs)
            finally:
                self.running = None

        calls = self._model.replaced.get(name)
        if calls is None:
            return run_block()
        if name in self._live:
            run_block()
        # Activation checkpointing runs blocks again in the backward: more calls than were recorded.
        call = calls[self._num_calls[name] % len(calls)]
        self._num_calls[name] += 1
        recorded = _recorded_leaves(call.args) + _recorded_leaves(call.kwargs)
        values = list(zip(recorded, leaves(args) + leaves(kwargs), strict=True))
        noise.comparison.compare(name, values, self._chosen)
        if name in noise.unreplaced:
            return run_block()
        try:
            made = self._noisy_result(call, values, partial(original, module), (args, kwargs))
        except ProbeError:  # its results have no dimension of samples, or are no real numbers
            noise.unreplaced.add(name)
            return run_block()
        if call.changes_arguments:
            made, *changed = made
            copy_into((args, kwargs), tuple(changed))
        if module._forward_hooks:
            # A library may collect the results of blocks, as transformers does with hidden states.
            with _forward_returning(module, made):
                return run_block()
        return made

    def _noisy_result(
        self, call: Call, values: Sequence[tuple[Tree, object]], block: Callable[..., Any], arguments: Any
    ) -> Any:
        """The recorded result of a block, with noise for the tensors that it made.

        `values` pairs the recorded inputs of the block with the current ones.
        """
        recording, noise = self._model.recording, self._noise
        graph = recording.graph
        fresh = {value.name for value in graph[call.name].makes}
        known = {tree.value: leaf for tree, leaf in values if isinstance(tree, Ref) and isinstance(leaf, Tensor)}
        lengths = {
            pair for name, leaf in known.items() for pair in zip(graph.spec(name).shape, leaf.shape, strict=False)
        }
        changed = {length: now for length, now in lengths if length != now}
        if noise.is_ambiguous(fresh, changed, {length for length, now in lengths if length == now}):
            # The result of the block itself shows which dimension holds the samples.
            args, kwargs = map_leaves(arguments, copy_leaf)
            # A block whose parameters are on another rank may raise anything.
            with suppress(Exception), torch.no_grad(), collect_added(lambda added: None):
                noise.set_shapes(call, block(*args, **kwargs))

        def built(result: Any) -> Any:
            if isinstance(result, Parts):
                return unflatten_one_level(result.kind, result.keys, [built(item) for item in result.items])
            if not isinstance(result, Ref):
                return result
            # A block may return something that it was given.
            return noise.draw(result.value, changed, self._chosen) if result.value in fresh else known[result.value]

        return built(recording.returned.get(call.name, Ref(call.results.values[0])))


class NoisyResult(NamedTuple):
    """The result of one forward with noise in place of the results of blocks."""

    output: Any
    added: tuple[tuple[str, Tensor], ...]
    """the losses that modules added, each with its block; "" for a loss that was added between blocks"""
    dtype: torch.dtype
    """the lowest precision that something was computed in"""


@contextmanager
def _forward_returning(module: nn.Module, result: Any) -> Iterator[None]:
    """Replace the forward of a module by one that returns `result`, so that calling the module runs only its hooks."""
    before = vars(module).get("forward")
    object.__setattr__(module, "forward", lambda *args, **kwargs: result)
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            object.__setattr__(module, "forward", before)


def _recorded_leaves(tree: Tree) -> list[Any]:
    """The leaves of a recorded structure, in the order in which `leaves` returns those of a real one."""
    return [leaf for item in tree.items for leaf in _recorded_leaves(item)] if isinstance(tree, Container) else [tree]
