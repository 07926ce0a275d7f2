"""Passage: one forward of a stage on one microbatch, kept until its backward."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.stages.deferrable import DEFERRABLE
from penstock.stages.deferral import Deferral
from penstock.stages.entrance import enter
from penstock.stages.stage import Stage

Gradients = Mapping[str, Tensor | None]


class Passage:
    """One forward of a stage, kept until its backward: `backward`, or `input_grad` and then `weight_grad`.

    `left` holds the values that left the stage until they are taken; only their places in the graph are kept. The
    gradients given to a backward that is split must stay as they are until `weight_grad`.
    """

    def __init__(
        self,
        stage: Stage,
        recording: Any,
        inputs: Mapping[str, Any],
        incoming: Mapping[str, Any],
        is_split: bool = False,
        seed: int | None = None,
    ) -> None:
        self.stage = stage
        self._returned: dict[str, Tensor | None] = {}
        given = enter(incoming, recording.graph.written, self._returned)
        # Without a value to return a gradient for, there is nothing to do but weight gradients.
        puts_off = is_split and self._returned and not stage.takes_gradients(recording)
        self._deferral = Deferral(DEFERRABLE) if puts_off else None
        self._is_late = is_split and not self._returned
        if self._deferral is None:
            self.left: dict[str, Any] = stage(recording, inputs, given, seed)
        else:
            self._deferral.is_forward = True
            with self._deferral:
                self.left = stage(recording, inputs, given, seed)
            self._deferral.is_forward = False
        self._edges: dict[str, GradientEdge] = {}
        self._waiting: dict[str, Tensor | None] = {}
        for name, value in self.left.items():
            self.add_root(name, value)

    def take_left(self) -> dict[str, Any]:
        """The values that left, which are the caller's from now on."""
        left, self.left = self.left, {}
        return left

    def add_root(self, name: str, value: Any) -> None:
        """Let a value computed from those that left, such as a loss, be given a gradient by this name."""
        if isinstance(value, Tensor) and value.requires_grad:
            self._edges[name] = get_gradient_edge(value)

    def backward(self, gradients: Gradients) -> dict[str, Tensor | None]:
        """Accumulate the stage's gradients; returns those of the values that came in.

        A gradient that is None, or that belongs to a value without a gradient, is left out.
        """
        self._walk(gradients)
        self._release()
        return self._take_returned()

    def input_grad(self, gradients: Gradients) -> dict[str, Tensor | None]:
        """Only the gradients of the values that came in, and what comes by on the way; `weight_grad` must follow."""
        if self._is_late:
            self._waiting = dict(gradients)
        else:
            self._walk(gradients)
        return self._take_returned()

    def weight_grad(self) -> None:
        """The gradients of the parameters that `input_grad` put off."""
        if self._is_late:
            self._walk(self._waiting)
            self._waiting = {}
        self._release()

    def _walk(self, gradients: Gradients) -> None:
        """One way through the graph, which is gone afterwards."""
        edges, self._edges = self._edges, {}
        given = {name: gradient for name, gradient in gradients.items() if gradient is not None and name in edges}
        roots = [edges[name] for name in given]
        edges.clear()
        if roots:
            self._go(roots, list(given.values()))

    def _go(self, roots: list[GradientEdge], gradients: list[Tensor]) -> None:
        if self._deferral is None or not self._deferral.is_recomputed:
            torch.autograd.backward(roots, gradients)
        else:
            # What is recomputed on the way must save what it saved at first.
            with self._deferral:
                torch.autograd.backward(roots, gradients)

    def _take_returned(self) -> dict[str, Tensor | None]:
        returned, self._returned = self._returned, {}
        return returned

    def _release(self) -> None:
        if self._deferral is not None:
            self.stage.release(self._deferral.queue)
