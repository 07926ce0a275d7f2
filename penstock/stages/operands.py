"""Operands: which arguments of a call can be told apart from its parameters, and how autocast would cast them."""

import torch
from torch import Tensor, nn

_PLAIN = (Tensor, nn.Parameter)
_VIEWS = frozenset(
    f"{name}Backward0" for name in ("T", "Transpose", "Permute", "Select", "Slice", "Unsqueeze", "Squeeze", "View")
)
"""of a parameter, as an expert is one of the matrices in a single tensor: these keep nothing, and may run twice"""
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def can_be_put_off(x: Tensor, weight: Tensor) -> bool:
    """Whether the weight is trained, both are ordinary tensors, and the weight is a parameter or a view of one."""
    return weight.requires_grad and type(x) in _PLAIN and _is_parameter(weight)


def goes_along(bias: Tensor) -> bool:
    """Whether the gradient of a bias, of one number for each column, can be put off with that of its weight."""
    return bias.requires_grad and bias.dim() == 1 and _is_parameter(bias)


def lowered(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The operands as autocast gives them to a product or a convolution."""
    kind = x.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return x, weight
    dtype = torch.get_autocast_dtype(kind)
    return _lower(x, dtype), _lower(weight, dtype)


def _lower(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype is torch.float64 else tensor.to(dtype)


def _is_parameter(tensor: Tensor) -> bool:
    if type(tensor) not in _PLAIN or tensor.dtype not in _FLOATS or tensor.layout is not torch.strided:
        return False
    node = tensor.grad_fn
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    # Only a leaf is where gradients are accumulated.
    return node is None or node.name() == "torch::autograd::AccumulateGrad"
