"""Book: which tensor goes by which name while a forward is recorded, and which tensors share memory."""

import weakref
from itertools import chain

import torch
from torch import Tensor, nn

from penstock.ir import TensorSpec


def spec_of(tensor: Tensor) -> TensorSpec:
    """What is known of a tensor without holding it."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(tuple(tensor.shape), dtype, tensor.requires_grad, _order_of(tensor))


def _order_of(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions as they lie in memory, if that is another order than their own and leaves no gaps."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return ()
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))
    return order if tensor.permute(order).is_contiguous() else ()


def memory_of(tensor: Tensor) -> int:
    """A number that tensors have in common exactly when they share memory."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except RuntimeError:
        # Sparse and other tensors without plain storage share nothing.
        return -id(tensor)


class Book:
    """Names of values and of state, by the identity of their tensors.

    Values are held, so that no other tensor gets their identity; tensors made inside a leaf are only noted.
    """

    def __init__(self, model: nn.Module) -> None:
        self.state = {id(tensor): name for name, tensor in model.named_parameters()}
        self.others = other_state(model)
        self.state |= {id(tensor): name for name, tensor in self.others.items()}
        self._state_in: dict[int, list[Tensor]] = {}
        for tensor in (*model.parameters(), *self.others.values()):
            self._state_in.setdefault(memory_of(tensor), []).append(tensor)
        self.specs: dict[str, TensorSpec] = {}
        self.memory: dict[str, int] = {}
        self._named: dict[int, tuple[Tensor, str]] = {}
        self._sharing: dict[int, list[Tensor]] = {}
        self._inside: dict[int, tuple[weakref.ref[Tensor], str, int]] = {}

    def add(self, tensor: Tensor, name: str) -> None:
        """From now on the tensor goes by this name."""
        if id(tensor) not in self._named:
            self._sharing.setdefault(memory_of(tensor), []).append(tensor)
        self._named[id(tensor)] = (tensor, name)
        self.specs[name] = spec_of(tensor)
        self.memory[name] = memory_of(tensor)

    def name(self, tensor: Tensor) -> str | None:
        """The name of a value, if the tensor is one."""
        found = self._named.get(id(tensor))
        return found[1] if found else None

    def sharing(self, tensor: Tensor) -> list[Tensor]:
        """All values in the memory of a tensor, itself included if it is one."""
        return self._sharing.get(memory_of(tensor), [])

    def state_beside(self, tensor: Tensor) -> list[Tensor]:
        """All parameters, buffers and plain tensors of the model in the memory of a tensor, itself included."""
        return self._state_in.get(memory_of(tensor), [])

    def is_in_state(self, name: str) -> bool:
        """Whether a value lies in the memory of a parameter, buffer or plain tensor of the model."""
        return self.memory[name] in self._state_in

    def note_inside(self, tensor: Tensor, leaf: str, call: int) -> None:
        """The tensor was made inside a call of a leaf and is no value, unless the leaf returns it."""
        self._inside[id(tensor)] = (weakref.ref(tensor), leaf, call)

    def leaf_of(self, tensor: Tensor) -> str | None:
        """The leaf inside which a tensor that is no value was made."""
        reference, leaf, _ = self._inside.get(id(tensor), (None, None, 0))
        return leaf if reference is not None and reference() is tensor else None

    def call_of(self, tensor: Tensor) -> int | None:
        """The number of the call of that leaf."""
        reference, _, call = self._inside.get(id(tensor), (None, "", None))
        return call if reference is not None and reference() is tensor else None


def other_state(model: nn.Module) -> dict[str, Tensor]:
    """Buffers, and tensors that modules hold as plain attributes."""
    found = dict(model.named_buffers())
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        found |= {prefix + name: thing for name, thing in vars(module).items() if isinstance(thing, Tensor)}
    return found


def has_same_numbers(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same; what is not a number is the same as itself."""
    if one.layout is not torch.strided:
        # Sparse tensors cannot be compared; their versions must do.
        return True
    if torch.equal(one, other):
        return True
    if one.shape != other.shape or not one.is_floating_point():
        return False
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())


def home_of(model: nn.Module) -> torch.device:
    """The device of the model: that of its first parameter or buffer."""
    for tensor in chain(model.parameters(), model.buffers()):
        return tensor.device
    return torch.device("cpu")
