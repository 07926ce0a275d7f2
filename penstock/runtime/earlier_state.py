"""Earlier state: buffers as they were before a step, so that one that fails leaves no trace in them either."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

Place = tuple[nn.Module, str]
"""a module, and how it calls one of its buffers"""


class _Kept(NamedTuple):
    buffer: Tensor
    numbers: Tensor


class EarlierState:
    """Copies of the buffers that a forward writes, such as the running means of a batch norm."""

    def __init__(self, places: Iterable[Place]) -> None:
        self._places = tuple(places)
        self._kept: tuple[_Kept, ...] = ()
        self._room: dict[Place, Tensor] = {}

    def begin(self) -> None:
        """A step is about to write them."""
        self._kept = tuple(_Kept(getattr(*place), self._copy(place)) for place in self._places)

    def _copy(self, place: Place) -> Tensor:
        """The numbers, in memory that is used again by later steps."""
        buffer, room = getattr(*place).detach(), self._room.get(place)
        if room is None or (room.shape, room.dtype, room.device) != (buffer.shape, buffer.dtype, buffer.device):
            self._room[place] = room = buffer.clone()
            return room
        return room.copy_(buffer)

    def restore(self) -> None:
        """The step has failed: they are what they were, also where the model has put another tensor in the place."""
        for (owner, name), kept in zip(self._places, self._kept, strict=False):
            with torch.no_grad():
                kept.buffer.copy_(kept.numbers)
            setattr(owner, name, kept.buffer)
        self._kept = ()

    def forget(self) -> None:
        """The step has succeeded."""
        self._kept = ()
