"""Shape, gradient, memory and content of tensors. `dtypes.py` has the properties that depend on the dtype."""

import sys
from itertools import chain

import torch
from torch import Tensor, nn

from penstock.capture.dtypes import dtype_name, is_inexact, real_entries
from penstock.ir import TensorSpec, leaves


def tensors_in(structure: object) -> list[Tensor]:
    """The tensors among the leaves of a nested structure, left to right."""
    return [leaf for leaf in leaves(structure) if isinstance(leaf, Tensor)]


TORCH_CONSTANTS = (torch.dtype, torch.device, torch.layout, torch.memory_format)
"""types of torch whose values are constants with a name"""


def spec_of(tensor: Tensor) -> TensorSpec:
    """Shape, dtype, `requires_grad` and memory order of a tensor."""
    # The dimensions from largest to smallest stride; empty for a contiguous tensor or one with gaps.
    order: tuple[int, ...] = ()
    if tensor.layout is torch.strided and not tensor.is_contiguous():
        strides = tensor.stride()
        by_stride = tuple(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))
        order = by_stride if tensor.permute(by_stride).is_contiguous() else ()
    return TensorSpec(tuple(tensor.shape), dtype_name(tensor.dtype), has_gradient(tensor), order)


def has_gradient(tensor: Tensor) -> bool:
    """Whether backward computes a gradient for the tensor.

    A view of a parameter that was made under `torch.no_grad` reports `requires_grad`, as its base does, but is not
    connected to it.
    """
    is_cut_off = tensor.grad_fn is None and tensor._is_view() and tensor._base.requires_grad
    return tensor.requires_grad and not is_cut_off


def storage_id(tensor: Tensor) -> int:
    """The identity of a tensor's storage, which views share; negative and unique for a tensor without storage."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except RuntimeError:
        # Sparse and other tensors share nothing.
        return -id(tensor)


def is_dtensor(value: object) -> bool:
    """Whether a value is a DTensor."""
    # Not imported here: that takes a second, and a process that has no DTensor does without.
    module = sys.modules.get("torch.distributed.tensor")
    return isinstance(value, getattr(module, "DTensor", ()))


def buffers_and_attributes(model: nn.Module) -> dict[str, Tensor]:
    """Buffers, and tensors that modules hold as plain attributes, by name."""
    tensors = dict(model.named_buffers())
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        tensors |= {prefix + name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
    return tensors


def same_content(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors hold the same numbers, of DTensors the parts of this rank; NaN equals NaN."""
    # torch.equal of DTensors is a collective call, and not all ranks compare the same tensors.
    first, second = (tensor.to_local() if is_dtensor(tensor) else tensor for tensor in (first, second))
    if first.layout is not torch.strided:
        # torch.equal does not support sparse tensors; for these only versions are compared.
        return True
    if torch.equal(first, second):
        return True
    if first.shape != second.shape or not is_inexact(first):
        return False
    first, second = real_entries(first), real_entries(second)
    return torch.equal(first.isnan(), second.isnan()) and torch.equal(first.nan_to_num(), second.nan_to_num())


def restore_content(tensor: Tensor, content: Tensor) -> None:
    """Write a copy of an earlier content back into a tensor, which may have been resized since.

    Observers of quantization resize their buffers in the first forward.
    """
    if tensor.shape == content.shape:
        tensor.data.copy_(content)
    else:
        tensor.data = content.clone()


def device_of(model: nn.Module, default: torch.device | None = None) -> torch.device:
    """The device of the first parameter or buffer; without any, `default` or the CPU."""
    for tensor in chain(model.parameters(), model.buffers()):
        return tensor.device
    return default or torch.device("cpu")
