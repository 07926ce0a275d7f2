"""The loss of each microbatch after the last stage, and its weight in the gradients of the batch."""

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor, nn

from penstock.batches import TARGET, Microbatch, SampleAxis, microbatch_sizes
from penstock.errors import RunError
from penstock.ir import named_leaves
from penstock.loss import LossStep, LossWeights
from penstock.runtime import MicrobatchWarning, checked_loss, no_gradient_error


class _OnePipeline:
    """The replicas that LossWeights sums over: only this one, since the caller averages gradients over replicas."""

    count = 1

    def sum(self, values: Tensor) -> Tensor:
        return values


class StepLoss:
    """Computes losses. With `scale_grads` they are weighted so that mean losses give the gradients of the batch.

    torch weights every microbatch by 1 / n_microbatches, which is correct for microbatches of equal size. Here the
    weights are also correct for microbatches of unequal size and for means over labels that are not ignored. The
    gradients of a loss that is a sum are divided by the number of microbatches, as in torch.
    """

    def __init__(self, loss_fn: Callable[..., Any], scale_grads: bool) -> None:
        self.func, self._scales = loss_fn, scale_grads
        self.kwargs: dict[str, Any] = {}
        """further keyword arguments of the loss function in this step"""
        self._loss_weights = LossWeights(None, _OnePipeline(), self)
        self._step: LossStep | None = None
        self._problems: set[str] = set()
        self.losses: dict[int, Tensor] = {}
        """by microbatch"""

    def __call__(self, output: Any, target: Any) -> Any:
        return self.func(output, target, **self.kwargs)

    def check_call(self, kwargs: dict[str, Any]) -> None:
        """Raise a RunError if the loss function does not take the output, the target and these keyword arguments."""
        function = self.func.forward if isinstance(self.func, nn.Module) else self.func
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            return
        try:
            signature.bind(None, None, **kwargs)
        except TypeError as error:
            raise RunError(
                f"loss_fn must take the output, the target and loss_kwargs: {error}",
                loss_fn=getattr(function, "__qualname__", type(function).__name__),
                loss_kwargs=list(kwargs),
                hint="def loss_fn(output, target, **loss_kwargs)",
            ) from None

    def begin(self, microbatches: Sequence[Microbatch], is_training: bool, kwargs: dict[str, Any]) -> None:
        """Prepare a step; `microbatches` have the targets."""
        self._step = LossStep(microbatches, (), is_training)
        self.kwargs, self.losses = kwargs, {}

    def end(self) -> None:
        """Release the targets and losses of the step."""
        self._step, self.kwargs, self.losses = None, {}, {}

    def loss(self, microbatch: int, output: Any) -> tuple[Tensor, float]:
        """Compute the loss of a microbatch; returns it and the factor of its gradients."""
        step = self._step
        given = step.microbatches[microbatch]
        returned = self(output, given.target)
        if not isinstance(returned, Tensor):
            raise RunError("loss_fn must return a tensor", got=type(returned).__name__)
        loss = checked_loss("", returned, given.size)
        self.losses[microbatch] = loss.detach().clone()
        if not step.is_training:
            return loss, 1.0
        if not loss.requires_grad:
            raise no_gradient_error()
        count = len(step.microbatches)
        if not self._scales or count == 1:
            return loss, 1.0
        self._loss_weights.weigh(step, microbatch, output, loss)
        if step.loss_problem and step.loss_problem not in self._problems:
            self._problems.add(step.loss_problem)
            warnings.warn(MicrobatchWarning(step.loss_problem), stacklevel=2)
        # Only the losses of a sum all have the weight 1.
        is_sum = all(weight == 1.0 for weight in step.weights)
        return loss, 1.0 / count if is_sum else step.weights[microbatch]


def target_rows(target: Any) -> dict[str, int]:
    """The number of rows of every tensor in a target, by name."""
    named = named_leaves(target, TARGET)
    return {name: len(leaf) for name, leaf in named if isinstance(leaf, Tensor) and leaf.dim()}


def split_target(
    target: Any, rows: Mapping[str, int], sizes: Sequence[int] | None, count: int
) -> tuple[Microbatch, ...]:
    """Split the target into microbatches: tensors along dimension 0, everything else is given to all of them.

    `rows` is the result of `target_rows`, and `sizes` are the numbers of samples of the microbatches. If they are
    known, a target may have several rows for each sample, the same number for all; if not, each tensor is split evenly.
    """
    for name, number in rows.items():
        if number < count:
            problem = "a target must have at least one row for each microbatch"
            raise RunError(problem, target=name, rows=number, microbatches=count, hint="a smaller n_microbatches")
    if sizes:
        axes = {name: SampleAxis(0, number // sum(sizes)) for name, number in rows.items()}
        return Microbatch((), {}, target, sum(sizes), axes).split(sizes)
    # Each microbatch as one sample with the rows that it gets of each tensor.
    lengths = {name: microbatch_sizes(number, count) for name, number in rows.items()}
    axes = {name: SampleAxis(0, offsets=tuple(accumulate(each, initial=0))) for name, each in lengths.items()}
    parts = Microbatch((), {}, target, count, axes).split([1] * count)
    part_axes = {name: SampleAxis(0) for name in rows}
    numbers = next(iter(lengths.values()), (1,) * count)
    return tuple(part._replace(size=number, axes=part_axes) for part, number in zip(parts, numbers, strict=True))
