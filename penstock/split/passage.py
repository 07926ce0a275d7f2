"""Passage: one forward of a stage on one microbatch, kept until its backward."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.split.stage import Stage


class Passage:
    """One forward of a stage, kept until its backward."""

    def __init__(self, stage: Stage, recording: Any, inputs: Mapping[str, Any], incoming: Mapping[str, Any]) -> None:
        self.stage = stage
        self.entered = {name: _entered(value) for name, value in incoming.items()}
        self._returned: dict[str, Tensor | None] = {}
        self._roots: list[tuple[Tensor, Tensor | None]] = []
        for name, value in self.entered.items():
            if _wants_gradient(value):
                self._returned[name] = None
                # Taken from the graph and not from `.grad`, which may be laid out anew and then sum in another order.
                value.register_hook(partial(self._returned.__setitem__, name))
        self.left = stage(recording, inputs, {name: self._given(recording, name) for name in self.entered})

    def _given(self, recording: Any, name: str) -> Any:
        """What came in, as the stage may use it: not the start of a graph, and not shared if it is written in place."""
        value = self.entered[name]
        if not isinstance(value, Tensor):
            return value
        return value.clone() if name in recording.graph.written else value.view_as(value)

    def backward(self, gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Accumulate the stage's gradients; returns those of the values that came in."""
        self._backward(gradients, None, keep=False)
        return dict(self._returned)

    def input_grad(self, gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Only the gradients of the values that came in; `weight_grad` must follow."""
        leaves = [value for value in self.entered.values() if _wants_gradient(value)]
        if not leaves:
            self._remember(gradients)
        elif self.stage._splits_backward:
            self._split_backward(gradients, leaves)
        else:
            self._backward(gradients, None, keep=False)
            self._roots = []
        return dict(self._returned)

    def _split_backward(self, gradients: Mapping[str, Tensor | None], leaves: list[Tensor]) -> None:
        try:
            self._backward(gradients, leaves, keep=True)
        except RuntimeError as error:
            if "use_reentrant" not in str(error):
                raise
            # Reentrant recomputation runs a whole backward or none.
            self.stage._splits_backward = False
            self._backward(gradients, None, keep=False)
            self._roots = []

    def weight_grad(self) -> None:
        """The gradients of the parameters, after `input_grad`."""
        parameters = [parameter for parameter in self.stage.parameters() if parameter.requires_grad]
        if self._roots and parameters:
            tensors, gradients = zip(*self._roots, strict=True)
            has_inputs = any(map(_wants_gradient, self.entered.values()))
            torch.autograd.backward(tensors, gradients, inputs=parameters if has_inputs else None)
        self._roots = []

    def _remember(self, gradients: Mapping[str, Tensor | None]) -> None:
        self._roots = [
            (self.left[name], gradient)
            for name, gradient in gradients.items()
            if isinstance(self.left.get(name), Tensor) and self.left[name].requires_grad
        ]

    def _backward(self, gradients: Mapping[str, Tensor | None], leaves: list[Tensor] | None, keep: bool) -> None:
        self._remember(gradients)
        if self._roots:
            tensors, values = zip(*self._roots, strict=True)
            torch.autograd.backward(tensors, values, inputs=leaves, retain_graph=keep)


def _entered(value: Any) -> Any:
    """A value as it comes in: the start of a new graph."""
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _wants_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
