"""Bytes of activations that one rank holds, sampled before every action of a step.

While a step runs, a dispatch mode notes the storage of every tensor of the size of an activation that any operation
makes, forward or backward, and strikes it off when the storage itself is gone: nothing that is held anywhere, also by
mistake, is left out. Gradients on their way to another rank are counted apart, as the simulator has no word for them.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import penstock
from penstock.runtime.step_compiler import RankProgram


class Storages(TorchDispatchMode):
    """The storages of one size that were made inside and still exist."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self.alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._note(leaf)
        return result

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.nbytes() == self._size and storage._cdata not in self.alive:
            self.alive.add(storage._cdata)
            weakref.finalize(storage, self.alive.discard, storage._cdata)


class Peaks:
    """The most that was held at once: activations with receive buffers, and receive buffers alone."""

    def __init__(self) -> None:
        self.held = self.buffers = 0

    def note(self, held: int, buffers: int) -> None:
        """What is held now."""
        self.held, self.buffers = max(self.held, held), max(self.buffers, buffers)


@contextmanager
def watched(pipeline: penstock.Pipeline, size: int) -> Iterator[Peaks]:
    """The peaks of the steps inside; each kind of step must have been taken before."""
    engine, peaks = pipeline._engine, Peaks()
    (prepared,) = (rank for compiled in engine._compiled_steps.values() for rank in compiled.rank_programs)
    status, storages = engine._groups.monitor._status, Storages(size)
    note_action = status.working

    def working(step: int, code: int) -> None:
        peaks.note(size * (len(storages.alive) - len(storages.alive & _leaving(prepared))), _posted(prepared))
        note_action(step, code)

    status.working = working
    try:
        with storages:
            yield peaks
    finally:
        del status.working


def _leaving(prepared: RankProgram) -> set[int]:
    """The storages of gradients that are sent, or about to be."""
    gradients = [end for end in prepared.send_slots if end.route.key[0] > end.route.key[1]]
    return {tensor.untyped_storage()._cdata for departure in gradients for tensor in departure.held}


def _posted(prepared: RankProgram) -> int:
    """Bytes of the buffers of messages that are not yet here."""
    return sum(buffer.nbytes for slot in prepared.recv_slots for buffer in slot.held)
