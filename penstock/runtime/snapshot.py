"""Gradients and buffers as they were before a step, so that a step that fails changes nothing."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

BufferName = tuple[nn.Module, str]
"""a module, and the name of one of its buffers"""


class StepSnapshot:
    """Takes the state before a step; afterwards `commit` keeps its results, `restore` undoes it.

    The gradients of `reduced` parameters are set aside during the step, because only the gradients that the step adds
    are summed over other ranks. Other gradients are accumulated in place, as in plain training, which gives the same
    bits; a copy is kept of those that exist.
    """

    def __init__(
        self,
        reduced: Iterable[nn.Parameter],
        parameters: Iterable[nn.Parameter],
        restores: bool,
        buffers: Iterable[BufferName] = (),
    ) -> None:
        """Without `restores` nothing is copied, and a step that fails drops all gradients."""
        self._reduced = tuple(dict.fromkeys(reduced))
        self._others = tuple(
            parameter for parameter in dict.fromkeys(parameters) if parameter not in set(self._reduced)
        )
        self._buffer_names = tuple(buffers) if restores else ()
        self._restores = restores
        self._aside: dict[nn.Parameter, Tensor | None] = {}
        self._gradients: dict[nn.Parameter, Tensor | None] = {}
        self._buffers: list[tuple[BufferName, Tensor, Tensor]] = []
        """name, the tensor that was there, and a copy of its values"""
        self._memory: dict[object, Tensor] = {}
        """copies of earlier steps, which are overwritten: allocating would cost more than copying"""

    def take(self) -> None:
        """Save the current state; call this before the step."""
        for parameter in self._reduced:
            self._aside[parameter], parameter.grad = parameter.grad, None
        if not self._restores:
            return
        for parameter in self._others:
            gradient = parameter.grad
            self._gradients[parameter] = None if gradient is None else self._copy(parameter, gradient.detach())
        for name in self._buffer_names:
            buffer = getattr(*name)
            self._buffers.append((name, buffer, self._copy(name, buffer.detach())))

    def _copy(self, key: object, tensor: Tensor) -> Tensor:
        memory = self._memory.get(key)
        if memory is None or not _fits(memory, tensor):
            memory = self._memory[key] = tensor.clone()
            return memory
        return memory.copy_(tensor)

    def commit(self) -> None:
        """Keep a successful step: add the gradients that were set aside to those of the step."""
        for parameter, earlier in self._aside.items():
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
        self._forget()

    def restore(self) -> None:
        """Undo a failed step: restore gradients and buffers to their values before it."""
        for (owner, name), buffer, values in self._buffers:
            with torch.no_grad():
                buffer.copy_(values)
            # The model may have assigned another tensor.
            setattr(owner, name, buffer)
        for parameter, earlier in self._aside.items():
            parameter.grad = earlier if self._restores else None
        for parameter in self._others:
            copy = self._gradients.get(parameter)
            if copy is None:
                parameter.grad = None
            elif parameter.grad is None or not _fits(copy, parameter.grad):
                parameter.grad = copy.clone()
            else:
                # In place, so that other references to the gradient, such as flat buffers, see the restored values.
                parameter.grad.copy_(copy)
        self._forget()

    def _forget(self) -> None:
        self._aside, self._gradients, self._buffers = {}, {}, []


def _fits(memory: Tensor, tensor: Tensor) -> bool:
    """Whether one tensor can be copied into the other in place."""
    kinds = [(type(one), one.dtype, one.device, one.layout, one.shape) for one in (memory, tensor)]
    return kinds[0] == kinds[1] and not tensor.is_sparse
