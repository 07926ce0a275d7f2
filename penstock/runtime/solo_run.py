"""Solo run: one forward of one node, kept until its backward, by the same passage that a stage runs in."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from penstock.runtime.adding import added_losses
from penstock.stages import DeferredAccumulator, StageRun

Values = dict[str, Any]
_ADDED = "added losses"
_RECORDING: Any = SimpleNamespace(graph=SimpleNamespace(written=frozenset()))
"""in the place of a recording, which a part has no use for"""
_UNREAD = {"": torch.zeros(0, requires_grad=True)}
"""comes in with every split run: without any value a passage would put off its whole backward, as a first stage does"""


class Part:
    """Stands where a StageRun expects a stage; it plays once, on values of its own, and lets go of them."""

    __slots__ = ("_play", "_values")

    def __init__(self, play: Callable[[Values], Values], values: Values) -> None:
        self._play, self._values = play, values

    def __call__(self, recording: Any, inputs: Any, given: Values, seed: int | None) -> Values:
        values, self._values = self._values, {}
        return self._play(values)

    def takes_gradients(self, recording: Any) -> bool:
        """Whether its forward runs a backward of its own; one that does would show it in its time alone."""
        return False

    def accumulate_deferred(self, queue: list[Any]) -> None:
        """Accumulate the weight gradients that were put off."""
        DeferredAccumulator().run(queue)


class Run:
    """One forward of a node, kept until its backward: whole, or the input part and then the weight part."""

    __slots__ = ("_added", "_passage")

    def __init__(self, part: Part, is_split: bool) -> None:
        with added_losses() as added:
            self._passage = StageRun(part, _RECORDING, {}, _UNREAD if is_split else {}, is_split)  # type: ignore[arg-type]
        self._added = {}
        if added:
            total = torch.stack([value.reshape(()) for value in added]).sum()
            self._passage.add_root(_ADDED, total)
            self._added[_ADDED] = torch.ones_like(total, requires_grad=False)

    @property
    def adds_loss(self) -> bool:
        """Whether a backward starts in the node itself."""
        return bool(self._added)

    def take_outputs(self) -> Values:
        """The values that the node made, which are the caller's from now on."""
        return self._passage.take_outputs()

    def backward(self, gradients: Mapping[str, Tensor]) -> None:
        """All gradients."""
        self._passage.backward({**gradients, **self._added})

    def input_grad(self, gradients: Mapping[str, Tensor]) -> None:
        """The gradients of the values that the node read; `weight_grad` must follow."""
        self._passage.input_grad({**gradients, **self._added})

    def weight_grad(self) -> None:
        """The gradients of the parameters."""
        self._passage.weight_grad()
