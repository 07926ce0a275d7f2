"""A training-mode forward of a whole batch whose backward starts from gradients of the outputs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.capture import in_double, real_inner_product
from penstock.errors import RunError
from penstock.ir import named_leaves
from penstock.runtime import Result


class ForwardPass:
    """Outputs of the model for a whole batch, on every rank, from `Pipeline.forward`.

    `backward(gradients)` adds the gradients of the parameters: it computes the forward again, with the same random
    numbers, so that activations are kept as long as in `Pipeline.step`.
    """

    def __init__(self, result: Result, sizes: Sequence[int], run: Callable[[dict[str, Tensor]], None]) -> None:
        """`run` takes the gradients of the outputs by name, each with one row per sample."""
        self.outputs, self.loss = result.outputs, result.loss
        self._result, self._sizes, self._run = result, sizes, run

    def backward(self, gradients: Any) -> None:
        """Run backward from the gradients of some outputs; collective.

        An output without a dimension of samples must be one number, such as a loss.

        Args:
            gradients: of the loss with respect to the outputs, in the structure of `outputs` with None for outputs
                without one, or a dict by names (`logits`, `hidden_states.0`); each has the shape of its output

        Raises:
            RunError: for other names or shapes, and as in `Pipeline.step`
        """
        outputs = {name: leaf for name, leaf in named_leaves(self.outputs, "") if isinstance(leaf, Tensor)}
        given = {name: leaf for name, leaf in named_leaves(gradients, "") if leaf is not None}
        if unknown := [name for name, leaf in given.items() if name not in outputs or not isinstance(leaf, Tensor)]:
            raise RunError(
                "gradients must have the structure of the outputs, or the names of some of them",
                got=f"{unknown[0] or 'no name'}: {type(given[unknown[0]]).__name__}",
                hint="one tensor" if list(outputs) == [""] else ", ".join(outputs),
            )
        if given:
            self._run({name: self._rows(name, outputs[name], gradient) for name, gradient in given.items()})

    def _rows(self, name: str, output: Tensor, gradient: Tensor) -> Tensor:
        """A gradient with one row per sample, which is split into microbatches like the batch."""
        if gradient.shape != output.shape:
            shapes = {"expected": tuple(output.shape), "got": tuple(gradient.shape)}
            hint = "torch.autograd.grad(loss, outputs), of the outputs of this forward"
            raise RunError("a gradient must have the shape of its output", output=name, **shapes, hint=hint)
        count = sum(self._sizes)
        if output.dim() == 0:
            # The number is a weighted sum over the microbatches: a loss has its own weights, any other the sizes.
            weights: Sequence[float] = self._result.weights_by_name.get(name) or self._result.weights
            weights = weights or [size / count for size in self._sizes]
            shares = [weight / size for weight, size in zip(weights, self._sizes, strict=True)]
            rows = torch.tensor(shares, dtype=torch.float64, device=gradient.device)
            return rows.repeat_interleave(torch.tensor(self._sizes, device=gradient.device)) * in_double(gradient)
        if len(output) % count:
            raise RunError(
                "only outputs whose first dimension is the batch can have a gradient",
                output=name,
                shape=tuple(output.shape),
                samples=count,
                hint="a model that returns this output with the samples first",
            )
        return gradient.reshape(count, -1, *gradient.shape[1:])


def pull_back(output: Any, gradients: Mapping[str, Tensor]) -> Tensor:
    """A loss function whose gradients with respect to the outputs are the given ones, one row per sample."""
    total: Tensor | None = None
    for name, leaf in named_leaves(output, ""):
        if name not in gradients:
            continue
        rows = gradients[name]
        if leaf.dim() == 0:
            product = real_inner_product(leaf, rows.sum().to(leaf.dtype))
        elif leaf.numel() == rows.numel() and leaf.shape[1:] == rows.shape[2:]:
            # In the dtype of the gradient: a float16 gradient could underflow before it is scaled.
            product = real_inner_product(leaf, rows.reshape(leaf.shape))
        else:
            shapes = {"expected": tuple(leaf.shape), "got": tuple(rows.shape)}
            raise RunError("the first dimension of an output is not that of the samples", output=name, **shapes)
        total = product if total is None else total + product
    if total is None:
        raise RunError("a microbatch has none of the outputs that have gradients", outputs=", ".join(gradients))
    return total
