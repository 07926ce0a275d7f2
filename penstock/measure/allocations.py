"""Tracks the memory that operations allocate until it is freed."""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class AllocationTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, counts the storage of every tensor that an operation makes, until the storage is freed.

    Storage from outside, such as that of parameters, is not counted. Each storage has a number, as its
    address may be used again. Memory that a kernel allocates and frees within one operation is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive: dict[int, int] = {}
        """bytes of every storage that is alive, by its number"""
        self.bytes = self.peak = 0
        self._numbers: dict[int, int | None] = {}
        self._finalizers: list[Any] = []
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in tensors((args, kwargs)):
            self._track(tensor, is_own=False)
        result = func(*args, **kwargs)
        for tensor in tensors(result):
            self._track(tensor, is_own=True)
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for finalizer in self._finalizers:
            finalizer.detach()

    def number(self, tensor: Any) -> int | None:
        """The number of a tensor's storage; None if it is from outside."""
        return self._numbers.get(storage_of(tensor)) if isinstance(tensor, Tensor) else None

    def _track(self, tensor: Tensor, is_own: bool) -> None:
        storage_id = storage_of(tensor)
        if storage_id in self._numbers or storage_id < 0:
            return
        storage = tensor.untyped_storage()
        finalizer = weakref.finalize(storage, self._freed, storage_id)
        finalizer.atexit = False
        self._finalizers.append(finalizer)
        self._numbers[storage_id] = None
        if is_own:
            self._count += 1
            self._numbers[storage_id] = self._count
            self.alive[self._count] = storage.nbytes()
            self.bytes += storage.nbytes()
            self.peak = max(self.peak, self.bytes)

    def _freed(self, storage_id: int) -> None:
        number = self._numbers.pop(storage_id)
        if number is not None:
            self.bytes -= self.alive.pop(number)


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors among the arguments or results of an operation."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))


def storage_of(tensor: Tensor) -> int:
    """An id of the storage of a tensor; -1 for sparse and other tensors without plain storage: not counted."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except RuntimeError:
        return -1


def bytes_behind(tensor: Tensor) -> int:
    """Bytes of the storage behind a tensor, which may be more or less than those of its elements."""
    plain = storage_of(tensor) >= 0
    return int(tensor.untyped_storage().nbytes()) if plain else tensor.numel() * tensor.element_size()


def storage_ids(tensors: Iterable[Tensor]) -> set[int]:
    """The ids of the storages of tensors, except those without plain storage."""
    return {storage_id for tensor in tensors if (storage_id := storage_of(tensor)) >= 0}
