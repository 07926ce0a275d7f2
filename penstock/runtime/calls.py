"""Calls: what the passes of a rank do, prepared; a compiled program is a flat list of these and of messages."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from penstock.runtime.transports import Tensors

Gradients = dict[str, Tensor | None]


class StageRun(Protocol):
    """One forward of a stage on one microbatch, kept until its backward."""

    def take_outputs(self) -> Mapping[str, Any]: ...

    def backward(self, gradients: Mapping[str, Tensor | None]) -> Gradients: ...

    def input_grad(self, gradients: Mapping[str, Tensor | None]) -> Gradients: ...

    def weight_grad(self) -> None: ...


class Player(Protocol):
    """Who runs the stages of a rank; what a step trains on is its own affair."""

    def forward(self, stage: int, microbatch: int, incoming: dict[str, Any], is_split: bool) -> StageRun: ...

    def can_split(self, stage: int) -> bool: ...

    def own_gradients(self, stage: int, microbatch: int) -> Gradients: ...

    def reduce(self, stage: int) -> None: ...

    def unshard(self, stage: int) -> None: ...

    def reshard(self, stage: int) -> None: ...


class Giver(Protocol):
    """Whom values are taken from."""

    def take(self) -> Tensors: ...


class Taker(Protocol):
    """Whom values are given to."""

    def put(self, tensors: Tensors) -> None: ...


class Source(NamedTuple):
    """Values that come from another stage, of this rank or of another."""

    names: tuple[str, ...]
    box: Giver


class Target(NamedTuple):
    """Values that go to another stage."""

    names: tuple[str, ...]
    box: Taker


class Cell:
    """What one (stage, microbatch) keeps from its forward to the last of its backward; empty between steps."""

    __slots__ = ("microbatch", "passage", "stage")

    def __init__(self, stage: int, microbatch: int) -> None:
        self.stage, self.microbatch = stage, microbatch
        self.clear()

    def clear(self) -> None:
        """Let go of it."""
        self.passage: Any = None


class PassCall(ABC):
    """One run of a stage over a microbatch that uses what other stages made, and makes what others use."""

    __slots__ = ("_cell", "_is_split", "_player", "_targets", "sources")

    def __init__(
        self, player: Player, cell: Cell, sources: Sequence[Source], targets: Sequence[Target], is_split: bool
    ) -> None:
        self._player, self._cell, self._is_split = player, cell, is_split
        self.sources, self._targets = tuple(sources), tuple(targets)

    @abstractmethod
    def __call__(self) -> None:
        """Run it; what comes from other ranks is here."""


class ForwardCall(PassCall):
    """Run the stage on what came, and hand on what leaves."""

    __slots__ = ()

    def __call__(self) -> None:
        """Run the stage."""
        cell, incoming = self._cell, dict[str, Any]()
        for names, giver in self.sources:
            incoming.update(zip(names, giver.take(), strict=True))
        passage = self._player.forward(cell.stage, cell.microbatch, incoming, self._is_split)
        cell.passage, left = passage, passage.take_outputs()
        for names, taker in self._targets:
            taker.put([left[name] for name in names])


class BackwardCall(PassCall):
    """Sum up the gradients that came, in the order of the sources; run the backward; hand back what returns."""

    __slots__ = ()

    def __call__(self) -> None:
        """Run the backward, whole or only for the inputs."""
        cell = self._cell
        total = self._player.own_gradients(cell.stage, cell.microbatch)
        for names, giver in self.sources:
            for name, gradient in zip(names, giver.take(), strict=True):
                if gradient is not None:
                    kept = total.get(name)
                    total[name] = gradient if kept is None else kept + gradient
        if self._is_split:
            returned = cell.passage.input_grad(total)
        else:
            returned = cell.passage.backward(total)
            cell.passage = None
        for names, taker in self._targets:
            taker.put([returned.get(name) for name in names])


class WeightGradCall:
    """The rest of a split backward; nothing where input and weight gradients ran as one."""

    __slots__ = ("_cell",)
    sources: tuple[Source, ...] = ()

    def __init__(self, cell: Cell) -> None:
        self._cell = cell

    def __call__(self) -> None:
        """Accumulate the gradients of the parameters."""
        if self._cell.passage is not None:
            self._cell.passage.weight_grad()
            self._cell.passage = None


class OverlapCall:
    """A forward and a backward that belong together, one after the other."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[Callable[[], None]]) -> None:
        self._parts = tuple(parts)

    def __call__(self) -> None:
        """Run both."""
        for part in self._parts:
            part()
