"""Runs: what a stage of consecutive atoms costs, for all runs of a box at once."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from penstock.partitioners.atoms.atoms import Atoms
from penstock.partitioners.atoms.uses import Floats, Ints
from penstock.partitioners.atoms.weighing import Weighing
from penstock.partitioners.atoms.windows import Box, Windows
from penstock.partitioners.search.bill import Bill


@dataclass(frozen=True)
class Runs:
    """The runs of atoms in their order; a run from `start` to `end` holds the atoms start, ..., end - 1."""

    atoms: Atoms

    @cached_property
    def weighing(self) -> Weighing:
        """Seconds, nodes from inputs only being run by every run that needs them."""
        free = self.atoms.free
        return Weighing.of(self.atoms.seconds, free.uses, free.seconds)

    @cached_property
    def keeping(self) -> Weighing:
        """Bytes from forward to backward, likewise."""
        free = self.atoms.free
        return Weighing.of(self.atoms.kept, free.uses, free.kept)

    @cached_property
    def parameters(self) -> Windows:
        """Bytes of parameters, tied ones once per run."""
        tensors = self.atoms.tensors
        return Windows.of(tensors.uses, tensors.parameters, len(self.atoms))

    def bytes(self, box: Box) -> Floats:
        """What the runs add to the bytes that a cut costs."""
        return self._received[0].over(box) + self._received[1].over(box) + self.parameters.over(box)

    def bill(self, box: Box, with_sent: bool = False) -> Bill:
        """All figures; what is sent only on demand."""
        nothing = np.zeros(box.shape)
        sent, regained = (window.over(box) for window in self._sent) if with_sent else (nothing, nothing)
        received, returned = (window.over(box) for window in self._received)
        return Bill(
            self.weighing.over(box),
            received,
            returned,
            sent,
            regained,
            self.parameters.over(box),
            self._state.over(box),
            self.keeping.over(box) + (self._held.over(box) if self.atoms.held.is_known else received),
        )

    @cached_property
    def _state(self) -> Windows:
        return Windows.of(self.atoms.tensors.uses, self.atoms.tensors.state, len(self.atoms))

    @cached_property
    def _held(self) -> Windows:
        return Windows.of(self.atoms.held.uses, self.atoms.held.sizes, len(self.atoms))

    @cached_property
    def _received(self) -> tuple[Windows, Windows]:
        values = self.atoms.values
        forward, backward = (
            Windows.of(values.uses, weights, len(self.atoms), values.maker)
            for weights in (values.forward, values.backward)
        )
        return forward, backward

    @cached_property
    def _sent(self) -> tuple[Windows, Windows]:
        values = self.atoms.values
        last = np.full(len(values.maker), -1, dtype=np.int64)
        np.maximum.at(last, values.uses.thing, np.minimum(values.uses.atom, len(self.atoms) - 1))
        forward, backward = (_leaving(values.maker, last, size) for size in (values.forward, values.backward))
        return forward, backward


def _leaving(maker: Ints, last: Ints, size: Floats) -> Windows:
    """A run pays for what it makes and what is read behind it, that is, whose last reader it does not hold."""
    used = last > maker
    maker, last, size = maker[used], last[used], size[used]
    nowhere = np.full(len(maker), -1, dtype=np.int64)
    before = np.concatenate((nowhere, nowhere, maker))
    place = np.concatenate((maker, last, last))
    weight = np.concatenate((size, -size, size))
    by_place = np.argsort(place, kind="stable")
    return Windows(before[by_place], place[by_place], weight[by_place])
