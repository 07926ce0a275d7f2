"""The loss of each microbatch after the last stage, and its weight in the gradients of the batch."""

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from penstock.batches import Microbatch, SampleAxis, microbatch_sizes, split_tensor
from penstock.capture import tensors_in
from penstock.errors import RunError
from penstock.ir import flatten_one_level, named_leaves, unflatten_one_level
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


def split_target(target: Any, sizes: Sequence[int] | None, count: int) -> tuple[Microbatch, ...]:
    """Split the target into microbatches: tensors along dimension 0, everything else is given to all of them.

    `sizes` are the numbers of samples of the microbatches. If they are known, a target may have several rows for each
    sample, the same number for all; if not, each tensor is split evenly.
    """
    axes: dict[str, SampleAxis] = {}
    columns = _split(target, "target", sizes, count, axes)
    if not sizes:
        first = next(iter(axes), "")
        tensors = [dict(named_leaves(column, "target")).get(first) for column in columns]
        sizes = [len(tensor) if isinstance(tensor, Tensor) else 1 for tensor in tensors]
    return tuple(Microbatch((), {}, column, size, axes) for column, size in zip(columns, sizes, strict=True))


def target_rows(target: Any) -> list[int]:
    """The different numbers of rows of the tensors in a target."""
    tensors = tensors_in(target)
    return sorted({len(tensor) for tensor in tensors if tensor.dim()})


def _split(value: Any, name: str, sizes: Sequence[int] | None, count: int, axes: dict[str, SampleAxis]) -> list[Any]:
    """Split a part of the target called `name`, and add its axis to `axes`."""
    if isinstance(value, Tensor) and value.dim():
        if len(value) < count:
            problem = "a target must have at least one row for each microbatch"
            raise RunError(problem, target=name, rows=len(value), microbatches=count, hint="a smaller n_microbatches")
        rows = len(value) // sum(sizes) if sizes else 1
        axes[name] = SampleAxis(0, rows)
        return split_tensor(value, [size * rows for size in sizes or microbatch_sizes(len(value), count)])
    parts = flatten_one_level(value)
    if parts is None:
        return [value] * count
    columns = [
        _split(item, f"{name}.{key}", sizes, count, axes) for key, item in zip(parts.keys, parts.items, strict=True)
    ]
    return [
        unflatten_one_level(parts.kind, parts.keys, [column[index] for column in columns]) for index in range(count)
    ]
