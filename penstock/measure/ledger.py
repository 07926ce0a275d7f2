"""Ledger: the memory that was taken inside it and is not yet given back, whoever holds it."""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside it, the memory of every tensor that an operation makes is noted, and struck off when it is gone.

    What operations are given from outside, such as parameters, is not counted. Each piece of memory has a number, as
    its address is used again. Memory that a kernel takes and gives back within one operation is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive: dict[int, int] = {}
        """bytes of every piece that is there, by its number"""
        self.bytes = self.peak = 0
        self._numbers: dict[int, int | None] = {}
        self._endings: list[Any] = []
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in tensors((args, kwargs)):
            self._meet(tensor, is_own=False)
        result = func(*args, **kwargs)
        for tensor in tensors(result):
            self._meet(tensor, is_own=True)
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for ending in self._endings:
            ending.detach()

    def number(self, tensor: Any) -> int | None:
        """The number of a tensor's memory; None if it is from outside."""
        return self._numbers.get(address_of(tensor)) if isinstance(tensor, Tensor) else None

    def _meet(self, tensor: Tensor, is_own: bool) -> None:
        address = address_of(tensor)
        if address in self._numbers or address < 0:
            return
        storage = tensor.untyped_storage()
        ending = weakref.finalize(storage, self._end, address)
        ending.atexit = False
        self._endings.append(ending)
        self._numbers[address] = None
        if is_own:
            self._count += 1
            self._numbers[address] = self._count
            self.alive[self._count] = storage.nbytes()
            self.bytes += storage.nbytes()
            self.peak = max(self.peak, self.bytes)

    def _end(self, address: int) -> None:
        number = self._numbers.pop(address)
        if number is not None:
            self.bytes -= self.alive.pop(number)


def tensors(thing: Any) -> Iterator[Tensor]:
    """The tensors among the arguments or results of an operation."""
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, list | tuple):
        for item in thing:
            yield from tensors(item)
    elif isinstance(thing, dict):
        yield from tensors(list(thing.values()))


def address_of(tensor: Tensor) -> int:
    """That of the memory; -1 for sparse and other tensors without plain memory, which are not counted."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except RuntimeError:
        return -1


def bytes_behind(tensor: Tensor) -> int:
    """Bytes of the memory behind a tensor, which may be more or less than those of its elements."""
    plain = address_of(tensor) >= 0
    return int(tensor.untyped_storage().nbytes()) if plain else tensor.numel() * tensor.element_size()


def addresses(some: Iterable[Tensor]) -> set[int]:
    """Where the memory of some tensors is."""
    return {address for tensor in some if (address := address_of(tensor)) >= 0}
