"""Evaluates the loss that a model returns on parts of a batch, without running the blocks of the model.

The model's own Python runs, but blocks return noise of the recorded shapes: an evaluation costs only the few functions
between the blocks. The gradients that `probe.py` compares are those with respect to the noise. The same runs show where
samples interact before a block: its inputs for all samples together must equal those for the parts.
"""

import math
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from penstock.batches import Microbatch
from penstock.capture import (
    Captured,
    Recording,
    copy_leaf,
    dtype_named,
    intercept_modules,
    uncompiled,
    without_cache,
    without_user_hooks,
)
from penstock.ir import Call, Container, Parts, Ref, Tree, copy_into, leaves, listed, put_together, transform
from penstock.loss.added import collect_added
from penstock.loss.probe import (
    COARSE,
    TOLERANCES,
    ConstantRandomness,
    Evaluate,
    Evaluation,
    FunctionTracker,
    ProbeError,
    evaluation,
)
from penstock.loss.samples import SMALL_SCALE, Part, choose_parts
from penstock.loss.terms import SINGLE, losses_of


def interaction_warnings(model: nn.Module, recording: Recording, mixing_blocks: Sequence[str]) -> tuple[str, ...]:
    """Warnings about the interaction of samples: inside blocks, and before those in `mixing_blocks`.

    The former are found by the types of modules, because probes do not run blocks.
    """
    blocks = tuple(f"{node.module}." for node in recording.graph.nodes if node.is_leaf)

    def modules_in_blocks(matches: Callable[[nn.Module], bool]) -> str:
        parts = model.named_modules()
        return listed([name for name, part in parts if matches(part) and f"{name}.".startswith(blocks)])

    norms = modules_in_blocks(
        lambda part: isinstance(part, _BatchNorm) and (part.training or part.running_mean is None)
    )
    embeddings = modules_in_blocks(
        lambda part: isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.scale_grad_by_freq
    )
    warnings = []
    if norms:
        warnings.append(f"batch norm takes its statistics from each microbatch instead of the whole batch: {norms}")
    if embeddings:
        problem = "scale_grad_by_freq counts the words of each microbatch instead of the whole batch"
        warnings.append(f"{problem}: {embeddings}")
    if mixing_blocks:
        problem = "a value depends on all samples of a batch, of which a microbatch has only some"
        warnings.append(f"{problem}: {listed(mixing_blocks)}")
    return tuple(warnings)


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
        self.mixing: list[str] | None = None
        """the blocks before which samples interact, once the loss was evaluated"""
        self._remote = set(remote_parameters.values())
        self._block_names = {id(module): name for name, module in recording.granularity.leaves(captured.model).items()}
        self._replaced: dict[str, list[Call]] = {}
        """the recorded calls of the blocks that noise replaces"""
        for call in recording.record.steps:
            if not isinstance(call, Call) or not call.is_module:
                continue
            # Blocks without parameters are cheap, and one that returns only scalars may compute the loss: these run.
            has_parameters = any(True for _ in captured.model.get_submodule(call.target).parameters())
            if has_parameters and any(recording.graph.spec(name).shape for name in call.results.values if name):
                self._replaced.setdefault(call.target, []).append(call)

    @property
    def sample_size(self) -> int:
        """The number of entries that the largest result of a block has for each sample."""
        calls = [call for calls in self._replaced.values() for call in calls]
        shapes = [self.recording.graph.spec(name).shape for call in calls for name in call.results.values if name]
        return max((math.prod(shape) for shape in shapes), default=1) // self.recorded_size

    def tensors(self, microbatch: Microbatch) -> dict[str, Tensor]:
        """The tensors of the inputs, by name."""
        return microbatch.countable(self.captured.inputs(microbatch.args, microbatch.kwargs))

    @contextmanager
    def evaluator(self, parts: Sequence[Part], draw: int) -> Iterator[Evaluate]:
        """Evaluate with noise that differs in every `draw`."""
        if sum(part.length for part in parts) == self.recorded_size:
            # No dimension would differ from the recorded ones, so that none would be known to hold the samples.
            raise ProbeError("the parts have as many samples together as were recorded")
        noise = Noise(self, parts, draw)

        def evaluate(chosen: Sequence[int]) -> Evaluation:
            run = self.run(noise, chosen)
            return evaluation(losses_of(run.output)[self._loss_name], noise.leaves(), noise.shared(), run.dtype)

        with self.isolated():
            yield evaluate
        self.mixing = list(noise.mixing)

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Restore everything that the model changes inside the context, and disable the user's hooks."""
        with ExitStack() as stack:
            stack.enter_context(self.captured.isolated(None, ()))
            stack.enter_context(uncompiled())
            stack.enter_context(without_user_hooks([self.captured.model]))
            stack.enter_context(torch.enable_grad())
            yield

    def run(self, noise: "Noise", chosen: Sequence[int], live: Collection[str] = ()) -> "Run":
        """Run the model for some parts together. Blocks in `live` run too, for the losses that they add."""
        num_calls: Counter[str] = Counter()
        added: list[tuple[str, Tensor]] = []
        # The block that is running, if any: modules inside it are not blocks, even if their module object is one.
        inside: list[str] = []

        def run_block(name: str, original: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
            inside.append(name)
            try:
                return original(module, *args, **kwargs)
            finally:
                inside.clear()

        def call_module(module: nn.Module, original: Any, args: Any, kwargs: Any) -> Any:
            name = self._block_names.get(id(module))
            if inside or name is None:
                return original(module, *args, **kwargs)
            if name not in self._replaced:
                return run_block(name, original, module, args, kwargs)
            if name in live:
                run_block(name, original, module, args, kwargs)
            # Activation checkpointing runs blocks again in the backward: more calls than were recorded.
            call = self._replaced[name][num_calls[name] % len(self._replaced[name])]
            num_calls[name] += 1
            values = list(zip(_flat(call.args) + _flat(call.kwargs), leaves(args) + leaves(kwargs), strict=True))
            noise.compare(name, values, chosen)
            try:
                if name not in noise.unreplaced:
                    made = self._noisy_result(call, values, noise, chosen, partial(original, module), (args, kwargs))
                    if call.changes_arguments:
                        made, *changed = made
                        copy_into((args, kwargs), tuple(changed))
                    if module._forward_hooks:
                        # A library may collect the results of blocks, as transformers does with hidden states.
                        with _forward_returning(module, made):
                            return run_block(name, original, module, args, kwargs)
                    return made
            except ProbeError:  # its results have no dimension of samples, or are integers
                noise.unreplaced.add(name)
            return run_block(name, original, module, args, kwargs)

        tracker = FunctionTracker()
        state = self.captured.model.state_dict(keep_vars=True)
        written = {name for update in self.recording.graph.updates for name in update.names} & state.keys()
        before = {name: state[name].detach().clone() for name in written}
        arguments = transform(noise.batch(chosen), copy_leaf)
        with ExitStack() as stack:
            stack.enter_context(intercept_modules(self.captured.model, call_module))
            stack.enter_context(tracker)
            stack.enter_context(collect_added(lambda loss: added.append((inside[0] if inside else "", loss.value))))
            if any(node.is_random for node in self.recording.graph.nodes):
                stack.enter_context(ConstantRandomness())
            output = self._call_model(*arguments)
        # The next run must begin with the same state.
        for name, content in before.items():
            state[name].data.copy_(content)
        return Run(output, tuple(added), tracker.dtype)

    def _call_model(self, args: Any, kwargs: Any) -> Any:
        # Parameters of other ranks may have no values here: those that are used between blocks are replaced by ones.
        model = self.captured.model
        used = {name for node in self.recording.graph.nodes if not node.is_leaf for name in node.parameters}
        missing = {name: p for name in used & self._remote if not (p := model.get_parameter(name)).isfinite().all()}
        if not missing:
            return self.captured.whole(*args, **kwargs)
        made = {name: torch.ones(p.shape, dtype=p.dtype, device=p.device) for name, p in missing.items()}
        return torch.func.functional_call(model, made, args, without_cache(model, kwargs))

    def _noisy_result(
        self,
        call: Call,
        values: Sequence[tuple[Tree, object]],
        noise: "Noise",
        chosen: Sequence[int],
        block: Callable[..., Any],
        arguments: Any,
    ) -> Any:
        """The recorded result of a block, with noise for the tensors that it made."""
        graph = self.recording.graph
        fresh = {value.name for value in graph[call.name].makes}
        known = {tree.value: leaf for tree, leaf in values if isinstance(tree, Ref) and isinstance(leaf, Tensor)}
        lengths = {
            pair for name, leaf in known.items() for pair in zip(graph.spec(name).shape, leaf.shape, strict=False)
        }
        changed = {length: now for length, now in lengths if length != now}
        if noise.is_ambiguous(fresh, changed, {length for length, now in lengths if length == now}):
            # The result of the block itself shows which dimension holds the samples.
            args, kwargs = transform(arguments, copy_leaf)
            # A block whose parameters are on another rank may raise anything.
            with suppress(Exception), torch.no_grad(), collect_added(lambda added: None):
                noise.set_shapes(call, block(*args, **kwargs))

        def built(result: Any) -> Any:
            if isinstance(result, Parts):
                return put_together(result.kind, result.keys, [built(item) for item in result.items])
            if not isinstance(result, Ref):
                return result
            # A block may return something that it was given.
            return noise.draw(result.value, changed, chosen) if result.value in fresh else known[result.value]

        return built(self.recording.returned.get(call.name, Ref(call.results.values[0])))


class Run(NamedTuple):
    """The output of a model, the losses added in it, each with the block that added it, and the lowest precision."""

    output: Any
    added: tuple[tuple[str, Tensor], ...]
    dtype: torch.dtype


class Noise:
    """Random results of blocks for the parts of a batch, drawn again from the same seeds in every run, not kept."""

    def __init__(self, model: ModelLoss, parts: Sequence[Part], draw: int) -> None:
        self._graph, self._draw = model.recording.graph, draw
        self._sizes, self._recorded_size = [part.length for part in parts], model.recorded_size
        self._parts = [model.microbatches[part.microbatch].take(part.start, part.length) for part in parts]
        first = next(model.captured.model.parameters(), None)
        self._device = torch.device("cpu") if first is None else first.device
        self._sample_dims: dict[str, tuple[int | None, tuple[int, ...]]] = {}
        """by value the dimension that holds the samples, and how long it is for each part"""
        self._shapes: dict[str, tuple[int, ...]] = {}
        """by value that a block was run to see: its shape for all parts together"""
        self._leaves: dict[tuple[int, str], weakref.ref[Tensor]] = {}
        """the noise of the current run by part, or -1 for noise that all parts share, and value"""
        self._num_compared: Counter[str] = Counter()
        """the calls of every block so far in the current run"""
        self._norms: dict[tuple[str, int, int], tuple[int | None, Tensor]] = {}
        """by block, call and argument: the dimension of samples and the norm of each sample, for all parts together"""
        self.unreplaced: set[str] = set()
        """blocks that run, because noise cannot replace the experts that a router chose, or packed sequences"""
        self.mixing: dict[str, None] = {}
        """the blocks before which samples interact"""

    def batch(self, chosen: Sequence[int]) -> Any:
        """The arguments of the model for some parts together. Called at the start of every run."""
        self._leaves.clear()
        self._num_compared.clear()
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
        tensors = [leaf for leaf in leaves(result) if isinstance(leaf, Tensor)]
        for name, tensor in zip(call.results.values, tensors, strict=False):
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
            raise ProbeError("a block returns integers")
        # The seed depends on draw, value and part only, so that every run of a draw has the same noise.
        seed = (self._draw * 10_000 + list(self._sample_dims).index(value)) * 100 + part + 1
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        scale = SMALL_SCALE if (self._draw + part) % 2 else 1.0
        leaf = (noise * scale).to(self._device, dtype).requires_grad_()
        self._leaves[part, value] = weakref.ref(leaf)
        return leaf

    def compare(self, name: str, values: Sequence[tuple[Tree, object]], chosen: Sequence[int]) -> None:
        """Add a block to `mixing` if its input activations for one part differ from those for all parts together.

        `values` pairs its recorded inputs with the current ones.
        """
        call = self._num_compared[name]
        self._num_compared[name] += 1
        for index, (tree, leaf) in enumerate(values):
            if not isinstance(tree, Ref) or not isinstance(leaf, Tensor) or not leaf.requires_grad:
                continue
            key, shape = (name, call, index), self._graph.spec(tree.value).shape
            if len(chosen) > 1:
                # The run for all parts together: keep the norm of each sample, not the activations.
                lengths = enumerate(zip(shape, leaf.shape, strict=False))
                dim = next((dim for dim, (recorded, now) in lengths if recorded != now), None)
                if dim is None or leaf.shape[dim] * self._recorded_size == shape[dim] * sum(self._sizes):
                    self._norms[key] = dim, _norms(leaf, dim)
            elif key in self._norms:
                dim, whole = self._norms[key]
                # Rows for each sample: several after `flatten(0, 1)`.
                rows = len(whole) // sum(self._sizes)
                start = rows * sum(self._sizes[: chosen[0]])
                expected = whole if dim is None else whole[start : start + rows * self._sizes[chosen[0]]]
                norms = _norms(leaf, dim)
                tolerance = TOLERANCES.get(leaf.dtype, COARSE)
                limit = tolerance * float(whole.max())
                if expected.shape != norms.shape or float((expected - norms).abs().max()) > limit:
                    self.mixing[name] = None


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


def find_mixing_blocks(model: ModelLoss, with_outputs: bool) -> list[str]:
    """The blocks of a model before which samples interact; `with_outputs` checks the outputs of the model too.

    Found by running the Python between the blocks for some samples together and in parts. Empty if that fails, as it
    does in models whose control flow depends on the values of activations.
    """
    graph = model.recording.graph
    if all(node.is_leaf or node.from_inputs for node in graph.nodes):
        return []
    sizes = [microbatch.size for microbatch in model.microbatches]
    # The recorded microbatch is one of them: together they must be more samples than were recorded.
    parts = choose_parts(sizes, model.sample_size, step_number=model.recorded)
    noise = Noise(model, parts, 0)
    try:
        with model.isolated():
            for chosen in ([*range(len(parts))], *([number] for number in range(len(parts)))):
                run = model.run(noise, chosen)
                if with_outputs:
                    outputs = zip(_flat(model.recording.record.outputs), leaves(run.output), strict=True)
                    noise.compare("the outputs", list(outputs), chosen)
    except Exception:  # the user's model may raise anything
        return []
    return list(noise.mixing)


def _norms(leaf: Tensor, dim: int | None) -> Tensor:
    """The norm of each row along a dimension, in float64; of the whole tensor if `dim` is None."""
    content = leaf.detach().abs().double()
    rows = content.reshape(1, -1) if dim is None else content.movedim(dim, 0).reshape(content.shape[dim], -1)
    return rows.square().sum(1).sqrt().cpu()


def _flat(tree: Tree) -> list[Any]:
    """The leaves of a recorded structure, in the order in which `leaves` returns those of a real one."""
    return [leaf for item in tree.items for leaf in _flat(item)] if isinstance(tree, Container) else [tree]
