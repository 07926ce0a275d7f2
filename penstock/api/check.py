"""check: compares one step of a plan with the unsplit model, and leaves the model unchanged."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.api.pipeline import Pipeline, check_loss_fn, check_model_and_plan, check_split
from penstock.capture import Captured, Microbatch, Split, split_batch
from penstock.errors import RunError
from penstock.ir import GRADIENT, Plan, compare_tensors, transform
from penstock.loss import AddedLosses, FunctionTracker, LossStep, added_with_reductions, loss_of
from penstock.planner import unsplit
from penstock.runtime import (
    MicrobatchWarning,
    ParityReport,
    RunOptions,
)
from penstock.stages import Ownership, distances

LossFn = Callable[[Any, Any], Tensor]
_SEED = 11
_LOSS, _BUFFER = "loss", "buffer "


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
) -> ParityReport:
    """Take one step by the plan, all ranks inside this process, and compare it with the unsplit model.

    Compared are the loss, the gradient of every parameter and every buffer with a loop over the same microbatches, and
    the loss and gradients with the whole batch, where buffers need not be the same. The model is left exactly as it
    was.
    """
    check_model_and_plan(model, plan)
    check_loss_fn(model, loss_fn)
    check_split(split, model)
    _check_batch(args, kwargs)
    bench = _Bench(model, plan, _Loss(loss_fn, reduction), split)
    batch = (tuple(args), dict(kwargs or {}), target)
    pieces = split_batch(model.forward, *batch, plan.num_microbatches, split)
    found = bench.pipeline(plan, batch)
    notes = [warning.cause for warning in found.issued]
    if any(node.is_random for node in bench.captured.recording(pieces[0].args, pieces[0].kwargs).graph.nodes):
        # The unsplit model as one stage: the same seeds go to the same blocks.
        loop = bench.pipeline(unsplit(plan), batch)
        notes.append("the model draws random numbers: compared block by block from the same seeds")
    else:
        loop = bench.plain(pieces, found.weights)
    stages, whole = _stages(plan), None
    if len(notes) == sum(not warning.is_certain for warning in found.issued):
        plain = bench.plain(split_batch(model.forward, *batch, 1, split), (1.0,))
        expected, own = plain.without_buffers, found.without_buffers
        whole = compare_tensors("the whole batch", distances(expected, own), stages, plain.coarsest)
    looped = compare_tensors("the same microbatches, one after another", distances(loop.numbers, found.numbers), stages)
    return ParityReport(looped, whole, tuple(notes))


def _check_batch(args: object, kwargs: object) -> None:
    if not isinstance(args, list | tuple):
        raise RunError("args must be a tuple of the model's arguments", got=type(args).__name__, hint="(x,)")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise RunError("kwargs must be a dict", got=type(kwargs).__name__, hint='{"labels": labels}')


@dataclass(frozen=True)
class _Loss:
    """The user's loss function and reduction."""

    function: LossFn | None
    reduction: str | None

    def of(self, output: Any, target: Any) -> Tensor:
        return loss_of(output) if self.function is None else self.function(output, target)


@dataclass(frozen=True)
class _Numbers:
    """The results of one step."""

    numbers: dict[str, Tensor | None]
    weights: tuple[float, ...] = ()
    issued: tuple[MicrobatchWarning, ...] = ()
    """warnings that the step issued"""
    coarsest: str = ""

    @property
    def without_buffers(self) -> dict[str, Tensor | None]:
        return {name: number for name, number in self.numbers.items() if not name.startswith(_BUFFER)}


class _Bench:
    """Runs steps of one model and collects losses, gradients and buffers."""

    def __init__(self, model: nn.Module, plan: Plan, loss: _Loss, split: Split | None) -> None:
        self._model, self._loss, self._split = model, loss, split
        self.captured = Captured.planned(model, plan.graph)

    def pipeline(self, plan: Plan, batch: tuple[Any, Any, Any]) -> _Numbers:
        """One step of the plan's pipeline, and the warnings it issued."""
        options = RunOptions(nonfinite="ignore")
        pipe = Pipeline(
            self._model,
            plan,
            loss_fn=self._loss.function,
            reduction=self._loss.reduction,
            local=True,
            split=self._split,
            options=options,
        )
        with self._undisturbed():
            args, kwargs, target = transform(batch, _copied)
            with _collect_warnings() as issued:
                result = pipe.step(*args, target=target, **kwargs)
            return _Numbers(self._numbers(result.loss), result.weights, tuple(issued))

    def plain(self, pieces: Sequence[Microbatch], weights: Sequence[float]) -> _Numbers:
        """One step of plain PyTorch over microbatches, with weighted losses."""
        samples, added_losses = sum(piece.size for piece in pieces), AddedLosses(self.captured)
        recordings = [self.captured.recording(piece.args, piece.kwargs) for piece in pieces]
        step = LossStep(pieces, recordings, True)
        with self._undisturbed():
            total, tracker = torch.zeros((), dtype=torch.float64), FunctionTracker(only_trained=True)
            for number, (piece, weight) in enumerate(zip(pieces, weights, strict=True)):
                own = transform(piece, _copied)
                with tracker, added_with_reductions() as added:
                    output = self.captured.whole(*own.args, **own.kwargs)
                    loss = self._loss.of(output, own.target)
                terms = [(loss, weight)] if weight else []
                if added:
                    nodes = {node.name for node in recordings[number].graph.nodes}
                    terms.append((added_losses.total(step, number, 0, nodes, added, piece.size / samples), 1.0))
                for value, factor in terms:
                    total = total + value.detach().double().reshape(()).cpu() * factor
                if terms:
                    torch.autograd.backward([v for v, _ in terms], [v.new_full(v.shape, f) for v, f in terms])
            return _Numbers(self._numbers(total.to(loss)), coarsest=str(tracker.dtype).removeprefix("torch."))

    def _numbers(self, loss: Tensor | None) -> dict[str, Tensor | None]:
        gradients = {GRADIENT + name: p.grad for name, p in self._model.named_parameters()}
        buffers = {_BUFFER + name: buffer.clone() for name, buffer in self._model.named_buffers()}
        return {_LOSS: loss, **gradients, **buffers}

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        with self.captured.isolated(_SEED), self.captured.without_accumulation_hooks():
            yield


@contextmanager
def _collect_warnings() -> Iterator[list[MicrobatchWarning]]:
    """Collect warnings about microbatches instead of showing them."""
    issued: list[MicrobatchWarning] = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield issued
    for one in said:
        if isinstance(one.message, MicrobatchWarning):
            issued.append(one.message)
        else:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


def _copied(leaf: object) -> object:
    """Copies, because the model may write into its inputs."""
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _stages(plan: Plan) -> dict[str, int]:
    """The stage that computes each value."""
    owners = Ownership(plan.graph, plan.partition)
    found = {_LOSS: plan.num_stages - 1}
    found |= {GRADIENT + value.name: owners.of(value.name) for value in plan.graph.parameters}
    return found | {_BUFFER + value.name: owners.of(value.name) for value in plan.graph.buffers}
