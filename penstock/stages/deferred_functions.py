"""The functions of torch whose weight gradients can be deferred: products, convolutions, embeddings.

Each function here takes the place of a torch function inside a `Deferral`. It runs the same kernel on the detached
weight and defers the weight gradient, computed by the same kernel that autograd would use, so that all numbers are
bit-identical. It returns None for calls that it cannot handle; those run as usual.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, mm, nn
from torch.nn import functional

from penstock.capture import ARITHMETIC_DTYPES
from penstock.stages.deferral import Deferral, DeferringFunction

_PLAIN_TYPES = (Tensor, nn.Parameter)
_VIEWS = frozenset(
    f"{name}Backward0" for name in ("T", "Transpose", "Permute", "Select", "Slice", "Unsqueeze", "Squeeze", "View")
)
"""views through which a parameter may be used, as one expert's matrix in a stacked tensor: their backward saves
nothing, so it can run twice"""


def _can_defer(x: Tensor, weight: Tensor) -> bool:
    """Whether the weight is a trained parameter, or a view of one, and no tensor is of a subclass."""
    return weight.requires_grad and type(x) in _PLAIN_TYPES and _is_parameter(weight)


def _can_defer_bias(bias: Tensor | None) -> bool:
    """Whether the gradient of a bias, a vector, can be deferred with that of its weight."""
    return bias is not None and bias.requires_grad and bias.dim() == 1 and _is_parameter(bias)


def _is_parameter(tensor: Tensor) -> bool:
    # Other leaves are not: the gradient of a value received from another stage is part of the input gradient.
    if type(tensor) not in _PLAIN_TYPES or tensor.dtype not in ARITHMETIC_DTYPES or tensor.layout is not torch.strided:
        return False
    node = tensor.grad_fn
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    if node is not None and node.name() != "torch::autograd::AccumulateGrad":
        return False
    return isinstance(tensor if node is None else node.variable, nn.Parameter)


def _autocast(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The operands as autocast would cast them: it casts behind the mode, where the function is already replaced."""
    device_type = x.device.type
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return x, weight
    dtype = torch.get_autocast_dtype(device_type)
    x, weight = (each if each.dtype is torch.float64 else each.to(dtype) for each in (x, weight))
    return x, weight


# Products

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def linear(deferral: Deferral, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """functional.linear: x W^T + b."""
    # torch multiplies a weight that is not contiguous in another way.
    if weight.dim() != 2 or not weight.is_contiguous() or not _can_defer(x, weight):
        return None
    # As torch does it: fused with the bias where the input is one matrix in memory, else the bias is added at the end.
    if bias is None or x.dim() == 2 or (x.dim() == 3 and x.is_contiguous()):
        return _product(deferral, functional.linear, x, weight, bias)
    result = _product(deferral, functional.linear, x, weight, None)
    return result + bias.to(result.dtype)


def addmm(deferral: Deferral, bias: Tensor, *factors: Tensor, **named: object) -> Tensor | None:
    """torch.addmm without alpha, beta and out: b + x W."""
    if named or len(factors) != 2 or not _is_matrix(factors[1]) or not _can_defer(factors[0], factors[1]):
        return None
    return _product(deferral, lambda x, weight, bias: torch.addmm(bias, x, weight), *factors, bias)


def matmul(deferral: Deferral, x: Tensor, *factors: Tensor, **named: object) -> Tensor | None:
    """torch.matmul and torch.mm without out: x W."""
    if named or not _is_matrix(factors[0]) or not _can_defer(x, factors[0]):
        return None
    return _product(deferral, lambda x, weight, bias: mm(x, weight), x, factors[0], None)


def _product(deferral: Deferral, call: Product, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    is_linear, is_contiguous = call is functional.linear, weight.is_contiguous()
    # A bias of one element is broadcast to all columns, and its gradient is not the sum of each column.
    has_bias = _can_defer_bias(bias) and len(bias) == weight.shape[0 if is_linear else 1]

    def gradients(x: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
        if is_linear:
            of_weight = mm(gradient.t(), x)
        else:
            # Autograd computes the gradient of a transposed matrix transposed.
            of_weight = mm(x.t(), gradient) if is_contiguous else mm(gradient.t(), x).t()
        return (of_weight, gradient.sum(0)) if has_bias else (of_weight,)

    x, detached = _autocast(x, weight.detach())
    rows = x if x.dim() == 2 else x.flatten(0, -2) if x.dim() > 2 else x.unsqueeze(0)
    weights = (weight, bias) if has_bias else (weight,)
    added = bias.detach() if has_bias else bias
    result = deferral.defer(call(rows, detached, added), rows, weights, gradients)
    return result if rows is x else result.view(*x.shape[:-1], result.shape[-1])


def _is_matrix(weight: object) -> bool:
    """Whether it is a matrix that is contiguous or the transpose of a contiguous one."""
    return isinstance(weight, Tensor) and weight.dim() == 2 and (weight.is_contiguous() or weight.t().is_contiguous())


def grouped_mm(deferral: Deferral, x: Tensor, weight: Tensor, *others: Any, **options: Any) -> Tensor | None:
    """functional.grouped_mm: each group of rows by its own matrix, as tokens by experts; `offs` are their ends."""
    offsets = options.pop("offs", None)
    has_more = others or any(option is not None for option in options.values())
    if has_more or offsets is None or x.dim() != 2 or weight.dim() != 3 or not _can_defer(x, weight):
        return None
    is_contiguous = weight.is_contiguous()

    def gradients(x: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
        if is_contiguous:
            return (functional.grouped_mm(x.t(), gradient, offs=offsets),)
        # Computed transposed, as autograd does for a transposed weight.
        return (functional.grouped_mm(gradient.t(), x, offs=offsets).transpose(-2, -1),)

    return deferral.defer(functional.grouped_mm(x, weight.detach(), offs=offsets), x, (weight,), gradients)


# Embeddings


def embedding(deferral: Deferral, indices: Tensor, weight: Tensor, **options: Any) -> Tensor | None:
    """functional.embedding, which passes all its options by keyword."""
    if options.get("sparse") or options.get("max_norm") is not None or not _can_defer(indices, weight):
        return None
    padding = options.get("padding_idx")
    padding = -1 if padding is None else padding % weight.shape[0]
    rows, is_scaled = weight.shape[0], options.get("scale_grad_by_freq", False)

    def gradients(indices: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
        return (torch.ops.aten.embedding_dense_backward(gradient, indices, rows, padding, is_scaled),)

    return deferral.defer(functional.embedding(indices, weight.detach(), **options), indices, (weight,), gradients)


# Convolutions


_DEFAULTS = {"stride": 1, "padding": 0, "dilation": 1, "output_padding": 0, "groups": 1}
_CONVOLUTION = ("stride", "padding", "dilation", "groups")
_TRANSPOSED = ("stride", "padding", "output_padding", "groups", "dilation")
"""the options of convolutions in the order of torch's arguments"""


def convolution(call: Callable[..., Tensor], names: tuple[str, ...]) -> DeferringFunction:
    """The function that takes the place of a convolution of torch whose options have these names."""

    def convolve(
        deferral: Deferral, x: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor | None:
        # Not a single sample without a batch dimension, nor padding="same".
        if x.dim() != weight.dim() or not _can_defer(x, weight):
            return None
        options: dict[str, Any] = {**_DEFAULTS, **dict(zip(names, args, strict=False)), **kwargs}
        if isinstance(options["padding"], str):
            return None
        x, detached = _autocast(x, weight.detach())
        has_bias = _can_defer_bias(bias)
        weights = (weight, bias) if has_bias else (weight,)
        added = bias.detach() if has_bias else bias
        compute = partial(_convolution_gradients, detached, options, names == _TRANSPOSED, has_bias)
        return deferral.defer(call(x, detached, added, *args, **kwargs), x, weights, compute)

    return convolve


def _convolution_gradients(
    weight: Tensor, options: dict[str, Any], is_transposed: bool, has_bias: bool, x: Tensor, gradient: Tensor
) -> tuple[Tensor, ...]:
    dims = weight.dim() - 2
    gradients = torch.ops.aten.convolution_backward(
        gradient,
        x,
        weight,
        list(gradient.shape[1:2]) if has_bias else None,
        *(_per_dim(options[name], dims) for name in ("stride", "padding", "dilation")),
        is_transposed,
        _per_dim(options["output_padding"], dims),
        options["groups"],
        [False, True, has_bias],
    )
    return tuple(each for each in gradients if each is not None)


def _per_dim(sizes: Any, dims: int) -> list[int]:
    numbers = [sizes] if isinstance(sizes, int) else list(sizes)
    return numbers * dims if len(numbers) == 1 else numbers


DEFERRABLE: dict[Any, DeferringFunction] = {
    functional.linear: linear,
    functional.embedding: embedding,
    **dict.fromkeys((torch.addmm, Tensor.addmm), addmm),
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm), matmul),
    **{call: convolution(call, _CONVOLUTION) for call in (torch.conv1d, torch.conv2d, torch.conv3d)},
    **{
        call: convolution(call, _TRANSPOSED)
        for call in (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
    },
    # The mode sees this function below functional.grouped_mm, where torch has it.
    **({torch._grouped_mm: grouped_mm} if hasattr(torch, "_grouped_mm") else {}),
}
"""the function that takes the place of each torch function inside a Deferral"""
