"""check: compares one step of a plan with the unsplit model, and leaves the model unchanged."""

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.api.arguments import LossFn, check_batch, check_loss_fn, check_model_and_plan, check_split
from penstock.api.pipeline import Pipeline, split_model
from penstock.batches import Batch, BatchSplitter, Microbatch, Split
from penstock.capture import (
    Captured,
    DrawSeed,
    Granularity,
    RowSlice,
    copy_leaf,
    dtype_name,
    is_inexact,
    isolated,
    row_slices,
    sharded_head,
    unsharded_granularity,
    without_accumulation_hooks,
)
from penstock.errors import RunError
from penstock.ir import GRADIENT, Comparison, Plan, compare_tensors, map_leaves, preformatted
from penstock.loss import (
    SINGLE,
    Added,
    AddedLosses,
    FunctionTracker,
    LossStep,
    collect_added,
    loss_module,
    losses_of,
    losses_of_function,
)
from penstock.runtime import LOSS_FN, MicrobatchWarning, RunOptions
from penstock.stages import Ownership, distances

_SEED = 11
_NUM_PERTURBED = 3
"""runs with other last bits of the weights, to find how large rounding errors are"""
_LOSS, _BUFFER = "loss", "buffer "


@dataclass(frozen=True)
class ParityReport:
    """The differences in the loss, the gradient of every parameter, and the buffers."""

    loop: Comparison
    """against the unsplit model on the same microbatches, one after another"""
    whole: Comparison | None
    """against the unsplit model on the whole batch; None where that cannot be equal"""
    notes: tuple[str, ...] = ()
    """why the whole batch cannot be equal, or may not be"""

    @property
    def ok(self) -> bool:
        """Whether the pipeline has the loss and gradients of the unsplit model."""
        return self.loop.ok and (self.whole is None or self.whole.ok)

    def __str__(self) -> str:
        parts = [str(part) for part in (self.loop, self.whole) if part is not None]
        if self.ok:
            summary = "the pipeline matches the unsplit model"
        elif self.loop.ok:
            summary = (
                "the stages are right, but the loss and gradients of the whole batch are not sums of those of its "
                "microbatches: samples interact, or the loss is weighted differently (try reduction=...)"
            )
        else:
            summary = "the pipeline is WRONG"
        return "\n".join((summary, *parts, *self.notes))

    def _repr_html_(self) -> str:
        return preformatted(str(self))


def check(
    model: nn.Module,
    plan: Plan,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: LossFn | None = None,
    target: Any = None,
    reduction: str | None = None,
    split: Split | None = None,
    depth: int | None = None,
    basic_blocks: Sequence[str | type] = (),
) -> ParityReport:
    """Run one step of the plan, with all ranks in this process, and compare it with the unsplit model.

    Loss, gradients and buffers are compared with those of a loop over the same microbatches; loss and gradients also
    with those of the whole batch, whose buffers may differ. The model is left exactly as it was.

    Args:
        model: the whole model
        plan: a plan of it
        args: the positional arguments of one batch
        kwargs: its keyword arguments
        loss_fn: as in `Pipeline`
        target: given to the loss function
        reduction: as in `Pipeline`
        split: as in `Pipeline`
        depth: as in `Pipeline`
        basic_blocks: as in `Pipeline`

    Returns:
        The differences; `print` it, or test its `ok`.

    Raises:
        RunError: if a step of the plan, or of the model itself, fails
        CaptureError: if the model cannot be recorded
    """
    check_model_and_plan(model, plan)
    check_loss_fn(model, loss_fn)
    check_split(split, model)
    check_batch(args, kwargs, RunError)
    runner = _StepRunner(model, plan, loss_fn, reduction, split, Granularity(depth, basic_blocks))
    batch = Batch(tuple(args), dict(kwargs or {}), target)
    splitter = BatchSplitter(model.forward, split, dict(plan.split))
    microbatches = splitter.split(batch, plan.num_microbatches)
    actual = runner.run_pipeline(batch)
    notes = [warning.cause for warning in actual.warnings]
    recording = runner.captured.recording(microbatches[0].args, microbatches[0].kwargs)
    seed = None
    if any(node.is_random for node in recording.graph.nodes):
        # The model itself, with every call seeded as in the stages.
        seed = actual.seed
        notes.append("the model draws random numbers: compared block by block from the same seeds")
    stages = _stages(plan, runner)

    whole = None
    # Compared only if nothing is known that makes the whole batch differ from its microbatches.
    if seed is None and not any(warning.is_certain for warning in actual.warnings):
        run = partial(runner.run_plain, splitter.split(batch, 1))
        plain = run()
        buffers = {name for name in (*plain.tensors, *actual.tensors) if name.startswith(_BUFFER)}
        whole = _compare("the whole batch", plain, actual, run, buffers, stages, plain.coarsest_dtype)

    run = partial(runner.run_plain, microbatches, actual.weights, seed)
    plain = run()
    if written := plain.written_in_backward:
        name = min(written).removeprefix(_BUFFER)
        notes.append(
            f"the backward updates {len(written)} buffers ({name}), as checkpointed batch norm does: in an order that "
            "depends on the schedule, so they are not compared"
        )
    # The stages compute in the same precision as the model, so only the sums of a whole batch, and of a vocabulary that
    # is split, may have larger rounding errors.
    coarsest = plain.coarsest_dtype if runner.slices else ""
    # A forward may register a constant that it caches, such as a mask, as a buffer. The stages have the constant of the
    # recording, and need no buffer. All other new buffers are refused when the model is recorded.
    skipped = written | (plain.tensors.keys() - actual.tensors.keys())
    loop = _compare("the same microbatches, one after another", plain, actual, run, skipped, stages, coarsest)
    return ParityReport(loop, whole, tuple(notes))


def _compare(
    against: str,
    plain: "_StepResult",
    actual: "_StepResult",
    run_plain: Callable[..., "_StepResult"],
    skipped: Collection[str],
    stages: Mapping[str, int],
    coarsest_dtype: str,
) -> Comparison:
    """Compare the pipeline with a plain step, without the skipped tensors; differences may be rounding errors only."""

    def tensors(result: _StepResult) -> dict[str, Tensor | None]:
        return {name: value for name, value in result.tensors.items() if name not in skipped}

    differences = list(distances(tensors(plain), tensors(actual)))
    comparison = compare_tensors(against, differences, stages, coarsest_dtype)
    if comparison.ok:
        return comparison
    # The pipeline is wrong, samples interact, or rounding errors are large: find how large.
    noise: dict[str, float] = {}
    for number in range(_NUM_PERTURBED):
        for one in distances(tensors(plain), tensors(run_plain(perturbed=number))):
            noise[one.name] = max(noise.get(one.name, 0.0), one.apart)
    return compare_tensors(against, differences, stages, coarsest_dtype, noise)


@dataclass(frozen=True)
class _StepResult:
    """Loss, gradients and buffers after one step."""

    tensors: dict[str, Tensor | None]
    weights: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """of the losses of the microbatches, by the name of the loss"""
    warnings: tuple[MicrobatchWarning, ...] = ()
    seed: int = 0
    """of the random numbers of a pipeline's step"""
    coarsest_dtype: str = ""
    """the floating-point dtype with the fewest bits that the step computed in"""
    written_in_backward: frozenset[str] = frozenset()
    """the buffers that the backward of a plain run changed"""


class _StepRunner:
    """Runs steps of one model, as a pipeline and in plain PyTorch; the model is left as it was."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        loss_fn: LossFn | None,
        reduction: str | None,
        split: Split | None,
        granularity: Granularity,
    ) -> None:
        self._model, self._plan, self._loss_fn = model, plan, loss_fn
        self._reduction, self._split = reduction, split
        self._granularity, self._loss_module = granularity, loss_module(loss_fn)
        shared, own = set(model.parameters()), self._loss_module.named_parameters() if self._loss_module else ()
        self.loss_parameters = {f"{LOSS_FN}.{name}": parameter for name, parameter in own if parameter not in shared}
        self.captured = Captured.planned(model, plan.graph, granularity)
        self.slices: dict[str, RowSlice] = {}
        """the parameters of the pipeline that are rows of parameters of the model"""
        if sharded_head(plan.graph) is not None:
            self.slices = row_slices(split_model(model, plan, loss_fn)[0])
            unsplit = unsharded_granularity(plan.graph).merged(model, granularity)
            self.captured = Captured(model, unsplit, (), {})

    def run_pipeline(self, batch: Batch) -> _StepResult:
        """Run one step of the plan."""
        options = RunOptions(nonfinite="ignore")
        pipe = Pipeline(
            self._model,
            self._plan,
            loss_fn=self._loss_fn,
            reduction=self._reduction,
            local=True,
            split=self._split,
            options=options,
            depth=self._granularity.depth,
            basic_blocks=self._granularity.basic_blocks,
        )
        with self._isolated():
            args, kwargs, target = map_leaves(batch, copy_leaf)
            with _collect_warnings() as collected:
                result = pipe.step(*args, target=target, **kwargs)
            weights = result.weights_by_name or {SINGLE: result.weights}
            return _StepResult(self._tensors(result.loss), weights, tuple(collected), result.seed)

    def run_plain(
        self,
        microbatches: Sequence[Microbatch],
        weights: Mapping[str, Sequence[float]] | None = None,
        seed: int | None = None,
        perturbed: int | None = None,
    ) -> _StepResult:
        """Run a loop over the microbatches in plain PyTorch, with weighted losses; without weights all count once.

        With a seed, every call draws the random numbers that it draws in a pipeline's step of this seed. `perturbed` is
        a seed too: the last bits of the weights are changed at random for this run.
        """
        samples, added_losses = sum(microbatch.size for microbatch in microbatches), AddedLosses(self.captured)
        pairs = self.captured.recordings([(part.args, part.kwargs) for part in microbatches], seed)
        recordings = [recording for recording, _ in pairs]
        step = LossStep(microbatches, recordings, is_training=True)
        with self._isolated():
            if perturbed is not None:
                _change_last_bits(self._model, perturbed)
            total, tracker = torch.zeros((), dtype=torch.float64), FunctionTracker(only_trained=True)
            written: set[str] = set()
            for index, microbatch in enumerate(microbatches):
                # Copies, because the model may write into its inputs.
                inputs = map_leaves(microbatch, copy_leaf)
                added: list[Added] = []
                with tracker, collect_added(added.append):
                    if seed is None:
                        output = self.captured.run_unsplit(*inputs.args, **inputs.kwargs)
                    else:
                        seed_of_part = DrawSeed(seed, index)
                        output = self.captured.run_unsplit_with_draws(seed_of_part, *inputs.args, **inputs.kwargs)
                    function = self._loss_fn
                    losses = losses_of_function(function(output, inputs.target)) if function else losses_of(output)
                weighted = [(loss, weights[name][index] if weights else 1.0) for name, loss in losses.items()]
                terms = [(loss, weight) for loss, weight in weighted if weight]
                if added:
                    nodes = {node.name for node in recordings[index].graph.nodes}
                    terms.append((added_losses.total(step, index, 0, nodes, added, samples), 1.0))
                for value, factor in terms:
                    total = total + value.detach().double().reshape(()).cpu() * factor
                # By value: batch norm writes its statistics without a new version.
                before = self._buffers()
                if terms:
                    torch.autograd.backward([v for v, _ in terms], [v.new_full(v.shape, f) for v, f in terms])
                written |= {name for name, buffer in self._buffers().items() if not _equal(buffer, before.get(name))}
            dtype = dtype_name(tracker.dtype)
            tensors = self._tensors(total.to(next(iter(losses.values()))))
            return _StepResult(tensors, coarsest_dtype=dtype, written_in_backward=frozenset(written))

    def _tensors(self, loss: Tensor | None) -> dict[str, Tensor | None]:
        parameters = (*self._model.named_parameters(), *self.loss_parameters.items())
        gradients = {GRADIENT + name: parameter.grad for name, parameter in parameters}
        return {_LOSS: loss, **gradients, **self._buffers()}

    def _buffers(self) -> dict[str, Tensor]:
        return {_BUFFER + name: buffer.clone() for name, buffer in self._model.named_buffers()}

    @contextmanager
    def _isolated(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self._loss_module is not None:
                stack.enter_context(isolated(self._loss_module))
            stack.enter_context(isolated(self.captured.model, _SEED))
            stack.enter_context(without_accumulation_hooks(self.captured.model))
            yield


@contextmanager
def _collect_warnings() -> Iterator[list[MicrobatchWarning]]:
    """Collect warnings about microbatches instead of showing them."""
    collected: list[MicrobatchWarning] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield collected
    for warning in caught:
        if isinstance(warning.message, MicrobatchWarning):
            collected.append(warning.message)
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def _change_last_bits(model: nn.Module, seed: int) -> None:
    """Multiply every weight by 1 plus or minus one unit in the last place, at random."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if is_inexact(parameter):
                signs = torch.randint(0, 2, parameter.shape, generator=generator).to(parameter) * 2 - 1
                parameter.mul_(1 + signs * torch.finfo(parameter.dtype).eps)


def _equal(one: Tensor, other: Tensor | None) -> bool:
    """Whether two buffers have the same values, where NaN equals NaN."""
    if other is None or one.shape != other.shape:
        return False
    are_nan = (one != one) & (other != other)
    return bool(((one == other) | are_nan).all())


def _stages(plan: Plan, runner: _StepRunner) -> dict[str, int]:
    """The stage that computes the loss, each gradient and each buffer."""
    owners = Ownership(plan.graph, plan.partition)
    stages = dict.fromkeys((_LOSS, *(GRADIENT + name for name in runner.loss_parameters)), plan.num_stages - 1)
    stages |= {GRADIENT + value.name: owners.of(value.name) for value in plan.graph.parameters}
    stages |= {_BUFFER + value.name: owners.of(value.name) for value in plan.graph.buffers}
    # The pipeline has shards of a split output layer; the whole parameters are compared.
    for name, row in runner.slices.items():
        stages.update((GRADIENT + other, stages[GRADIENT + name]) for other in row.names)
    return stages
