"""The door to the proof: a plan's pipeline run beside the unsplit model, everything left as it was."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.api.pipeline import Pipeline
from penstock.capture import Captured
from penstock.ir.cluster import Cluster
from penstock.ir.containers import transform
from penstock.ir.plan import Plan
from penstock.planner import Request, estimate, make
from penstock.runtime.batch import Microbatch, cut
from penstock.split.ownership import Ownership
from penstock.training.adding import added_losses
from penstock.training.coupling import couplings
from penstock.training.loss_value import loss_of
from penstock.training.options import RunOptions
from penstock.training.parity import Numbers, ParityReport, compare
from penstock.training.result import Result

LossFn = Callable[[Any, Any], Tensor]
_SEED = 11
_LOSS, _GRADIENT, _BUFFER = "loss", "gradient of ", "buffer "


def check(
    model: nn.Module,
    plan: Plan,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: LossFn | None = None,
    target: Any = None,
    reduction: str | None = None,
) -> ParityReport:
    """Take one step by the plan, all ranks inside this process, and compare it with the unsplit model.

    Compared are the loss, the gradient of every parameter and every buffer, with a loop over the same microbatches
    and with the whole batch. The model is left exactly as it was.
    """
    bench = _Bench(model, plan, loss_fn, reduction)
    pieces = cut(model.forward, tuple(args), dict(kwargs or {}), target, plan.num_microbatches)
    (batch,) = cut(model.forward, tuple(args), dict(kwargs or {}), target, 1)
    recording = bench.captured.recording(pieces[0].args, pieces[0].kwargs)
    result, found = bench.pipeline(plan, batch)
    notes = couplings(model, recording)
    if any(node.is_random for node in recording.graph.nodes):
        # The unsplit model as one stage: the same seeds go to the same blocks.
        _, loop = bench.pipeline(_unsplit(plan), batch)
        notes += ("the model draws random numbers: compared block by block from the same seeds",)
    else:
        loop = bench.plain(pieces, result.weights)
    stages = _stages(plan)
    whole = None if notes else compare("the whole batch", bench.plain((batch,), (1.0,)), found, stages)
    return ParityReport(compare("the same microbatches, one after another", loop, found, stages), whole, notes)


class _Bench:
    """Runs steps of one model and brings their numbers home."""

    def __init__(self, model: nn.Module, plan: Plan, loss_fn: LossFn | None, reduction: str | None) -> None:
        self._model, self._loss_fn, self._reduction = model, loss_fn, reduction
        self.captured = Captured.planned(model, plan.graph)

    def pipeline(self, plan: Plan, batch: Microbatch) -> tuple[Result, Numbers]:
        """One step of a plan's pipeline."""
        options = RunOptions(nonfinite="ignore")
        pipe = Pipeline(
            self._model, plan, loss_fn=self._loss_fn, reduction=self._reduction, local=True, options=options
        )
        with self._undisturbed():
            own = transform(batch, _copied)
            result = pipe.step(*own.args, target=own.target, **own.kwargs)
            return result, self._numbers(result.loss)

    def plain(self, pieces: Sequence[Microbatch], weights: Sequence[float]) -> Numbers:
        """One step of plain PyTorch over some microbatches, the loss of each with its weight."""
        with self._undisturbed():
            total: Tensor | None = None
            for piece, weight in zip(pieces, weights, strict=True):
                own = transform(piece, _copied)
                with added_losses() as added:
                    output = self.captured.whole(*own.args, **own.kwargs)
                loss = loss_of(output) if self._loss_fn is None else self._loss_fn(output, own.target)
                terms = [(loss, weight)] if weight else []
                # Added losses count by their samples, whatever the loss counts by.
                terms += [(value, piece.size / sum(each.size for each in pieces)) for value in added]
                if terms:
                    torch.autograd.backward([v for v, _ in terms], [v.new_full(v.shape, s) for v, s in terms])
                    part = torch.stack([v.detach().double().reshape(()) * s for v, s in terms]).sum()
                    total = part if total is None else total + part
            return self._numbers(None if total is None else total.to(loss.dtype))

    def _numbers(self, loss: Tensor | None) -> Numbers:
        gradients = {_GRADIENT + name: p.grad for name, p in self._model.named_parameters()}
        buffers = {_BUFFER + name: buffer.clone() for name, buffer in self._model.named_buffers()}
        return {_LOSS: loss, **gradients, **buffers}

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        with self.captured.undisturbed(_SEED), self.captured.without_parameter_hooks():
            yield


def _copied(leaf: object) -> object:
    """The model may write into its inputs."""
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _unsplit(plan: Plan) -> Plan:
    """The same microbatches through one stage on one rank."""
    request = Request(Cluster(1), plan.num_microbatches, "gpipe", "uniform", 1)
    return make(plan.graph, estimate(plan.graph), request)


def _stages(plan: Plan) -> dict[str, int]:
    """The stage in which each number is made."""
    owners = Ownership(plan.graph, plan.partition)
    found = {_LOSS: plan.num_stages - 1}
    found |= {_GRADIENT + value.name: owners.of(value.name) for value in plan.graph.parameters}
    return found | {_BUFFER + value.name: owners.of(value.name) for value in plan.graph.buffers}
