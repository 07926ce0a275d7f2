"""The names of tensors while a forward is recorded, and the tensors that share memory."""

import weakref
from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from penstock.capture.tensors import buffers_and_attributes, spec_of, storage_id
from penstock.ir import TensorSpec

Edge = tuple[Any, int]
"""where a tensor is in autograd's graph: the node that made it, and the index of the tensor among its results"""


class TensorTable:
    """Names of values and of the model's state, by the identity of their tensors.

    A *value* is an input of the model or a tensor that a recorded call returned. *State* is the parameters, buffers and
    tensors that modules hold as plain attributes. Tensors made inside a block are neither, unless it returns them.
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
        # Tensors inside blocks are many and large, so they are not held; a dead reference means the id was reused.
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

    def name_or_empty(self, tensor: Tensor) -> str:
        """The name of a value; "" if the tensor is not one, as a parameter."""
        return self.name(tensor) or ""

    def is_known(self, tensor: Tensor) -> bool:
        """Whether a tensor is a value or state."""
        return id(tensor) in self._values or id(tensor) in self.state

    def name_results(self, call: str, tensors: list[Tensor]) -> tuple[str, ...]:
        """Name the new tensors among the results of a call after it; returns the names of all, "" for state."""
        fresh = {id(tensor): tensor for tensor in tensors if not self.is_known(tensor)}
        # An argument of the model may have the name of the submodule that it is passed to.
        is_own_name = len(fresh) == 1 and call not in self.specs
        for index, tensor in enumerate(fresh.values()):
            self.add(tensor, call if is_own_name else f"{call}:{index}")
        return tuple(map(self.name_or_empty, tensors))

    def rename_written(self, call: str, written: list[Tensor]) -> tuple[tuple[str, str], ...]:
        """Give new names to values that a call wrote in place and all that share their memory; (new, old) pairs."""
        writes: list[tuple[str, str]] = []
        sharing = (self._values_by_storage.get(storage_id(tensor), ()) for tensor in written)
        for tensor in {id(alias): alias for aliases in sharing for alias in aliases}.values():
            old, new = self.name(tensor), f"{call}!{len(writes)}"
            if old is not None and id(tensor) not in self.state:
                self.add(tensor, new)
                writes.append((new, old))
        return tuple(writes)

    def name_updates(self, call: str, written: list[Tensor], start: int) -> tuple[tuple[str, str], ...]:
        """Name the buffers that a call wrote as values, so that a stage can send their new content to others.

        Returns pairs (value, buffer). The values are numbered from `start`, after those of `rename_written`.
        """
        buffers = [tensor for tensor in written if not isinstance(tensor, nn.Parameter)]
        updates = tuple((f"{call}!{number}", self.state[id(tensor)]) for number, tensor in enumerate(buffers, start))
        for tensor, (value, _) in zip(buffers, updates, strict=True):
            self.add(tensor, value)
        return updates

    def values_named(self, names: Collection[str]) -> tuple[Tensor, ...]:
        """The tensors of the values with these names."""
        return tuple(tensor for tensor, name in self._values.values() if name in names)

    def state_sharing(self, tensor: Tensor) -> list[Tensor]:
        """All state in the memory of a tensor, itself included if it is state."""
        return self._state_by_storage.get(storage_id(tensor), [])

    def is_view_of_state(self, value: str) -> bool:
        """Whether a value shares memory with a parameter, buffer or plain tensor of the model."""
        return self.storage[value] in self._state_by_storage

    def add_inside(self, tensor: Tensor, block: str, call: int) -> None:
        """Note that a tensor was made inside a call of a block, with the number of the call."""
        self._inside[id(tensor)] = (weakref.ref(tensor), block, call)

    def made_inside(self, tensor: Tensor) -> tuple[str, int] | None:
        """The block in which a tensor was made, and the number of its call; None if it was made elsewhere."""
        entry = self._inside.get(id(tensor))
        return (entry[1], entry[2]) if entry is not None and entry[0]() is tensor else None
