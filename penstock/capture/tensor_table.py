"""The names of tensors while a forward is recorded, and the tensors that share memory."""

import weakref
from collections.abc import Collection
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from penstock.ir import TensorSpec

Edge = tuple[Any, int]
"""where a tensor is in autograd's graph: the node that made it, and the index of the tensor among its results"""


class TensorTable:
    """Names of values and of the model's state, by the identity of their tensors.

    A *value* is an input of the model or a tensor that a recorded call returned. *State* are parameters, buffers and
    tensors that modules hold as plain attributes. Tensors made inside a leaf are neither, unless the leaf returns them.
    """

    def __init__(self, model: nn.Module) -> None:
        self.state = {id(tensor): name for name, tensor in model.named_parameters()}
        """names of all state by identity"""
        self.buffers = buffers_and_attributes(model)
        """state other than parameters, by name"""
        self.state |= {id(tensor): name for name, tensor in self.buffers.items()}
        self._state_by_storage: dict[int, list[Tensor]] = {}
        for tensor in (*model.parameters(), *self.buffers.values()):
            self._state_by_storage.setdefault(storage_id(tensor), []).append(tensor)
        self.specs: dict[str, TensorSpec] = {}
        """the spec of every value"""
        self.storage: dict[str, int] = {}
        """the storage id of every value"""
        self.edges: dict[str, Edge] = {}
        """where every value that a gradient reaches is in autograd's graph"""
        # The tensors are held: a freed tensor's id() would be given to another one.
        self._values: dict[int, tuple[Tensor, str]] = {}
        self._values_by_storage: dict[int, list[Tensor]] = {}
        # Tensors inside leaves are many and large, so they are not held; a dead reference means the id was reused.
        self._inside: dict[int, tuple[weakref.ref[Tensor], str, int]] = {}

    def add(self, tensor: Tensor, name: str) -> None:
        """Name a value, or give one a new name."""
        if id(tensor) not in self._values:
            self._values_by_storage.setdefault(storage_id(tensor), []).append(tensor)
        self._values[id(tensor)] = (tensor, name)
        self.specs[name] = spec_of(tensor)
        self.storage[name] = storage_id(tensor)
        if tensor.grad_fn is not None:
            # Noted now: a value that is written in place later gets another name and another node.
            self.edges[name] = tensor.grad_fn, tensor.output_nr

    def name(self, tensor: Tensor) -> str | None:
        """The name of a value; None if the tensor is not one."""
        entry = self._values.get(id(tensor))
        return entry[1] if entry else None

    def values_named(self, names: Collection[str]) -> tuple[Tensor, ...]:
        """The tensors of the values with these names."""
        return tuple(tensor for tensor, name in self._values.values() if name in names)

    def values_sharing(self, tensor: Tensor) -> list[Tensor]:
        """All values in the memory of a tensor, itself included if it is a value."""
        return self._values_by_storage.get(storage_id(tensor), [])

    def state_sharing(self, tensor: Tensor) -> list[Tensor]:
        """All state in the memory of a tensor, itself included if it is state."""
        return self._state_by_storage.get(storage_id(tensor), [])

    def is_view_of_state(self, value: str) -> bool:
        """Whether a value shares memory with a parameter, buffer or plain tensor of the model."""
        return self.storage[value] in self._state_by_storage

    def add_inside(self, tensor: Tensor, leaf: str, call: int) -> None:
        """Note that a tensor was made inside a call of a leaf, with the number of the call."""
        self._inside[id(tensor)] = (weakref.ref(tensor), leaf, call)

    def made_inside(self, tensor: Tensor) -> tuple[str, int] | None:
        """The leaf in which a tensor was made, and the number of its call; None if it was made elsewhere."""
        entry = self._inside.get(id(tensor))
        return (entry[1], entry[2]) if entry is not None and entry[0]() is tensor else None


def spec_of(tensor: Tensor) -> TensorSpec:
    """Shape, dtype, `requires_grad` and memory order of a tensor."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    # The dimensions from largest to smallest stride; empty for a contiguous tensor or one with gaps.
    order: tuple[int, ...] = ()
    if tensor.layout is torch.strided and not tensor.is_contiguous():
        strides = tensor.stride()
        by_stride = tuple(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))
        order = by_stride if tensor.permute(by_stride).is_contiguous() else ()
    return TensorSpec(tuple(tensor.shape), dtype, has_gradient(tensor), order)


def has_gradient(tensor: Tensor) -> bool:
    """Whether backward computes a gradient for the tensor.

    A view of a parameter that was made under `torch.no_grad` reports `requires_grad`, as its base does, but is not
    connected to it.
    """
    is_cut_off = tensor.grad_fn is None and tensor._is_view() and tensor._base.requires_grad  # type: ignore[union-attr]
    return tensor.requires_grad and not is_cut_off


def storage_id(tensor: Tensor) -> int:
    """A number that is equal for two tensors exactly when they share memory."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except RuntimeError:
        # Sparse and other tensors without plain storage share nothing.
        return -id(tensor)


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
    first, second = (tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in (first, second))
    if first.layout is not torch.strided:
        # torch.equal does not support sparse tensors; for these only versions are compared.
        return True
    if torch.equal(first, second):
        return True
    if first.shape != second.shape or not first.is_floating_point():
        return False
    return torch.equal(first.isnan(), second.isnan()) and torch.equal(first.nan_to_num(), second.nan_to_num())


def device_of(model: nn.Module, default: torch.device | None = None) -> torch.device:
    """The device of the first parameter or buffer; without any, `default` or the CPU."""
    for tensor in chain(model.parameters(), model.buffers()):
        return tensor.device
    return default or torch.device("cpu")
