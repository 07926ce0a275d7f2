"""Aside: gradients of earlier steps, put away while a step that reduces its own is running."""

from collections.abc import Iterable

from torch import Tensor, nn


class Aside:
    """What must not be reduced a second time."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = tuple(dict.fromkeys(parameters))
        self._kept: dict[nn.Parameter, Tensor] = {}

    def begin(self) -> None:
        """Put away what is there."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                self._kept[parameter] = parameter.grad
                parameter.grad = None

    def drop(self) -> None:
        """Forget it, where all gradients are dropped."""
        self._kept.clear()

    def finish(self) -> None:
        """Add it to what the step brought."""
        for parameter, kept in self._kept.items():
            parameter.grad = kept if parameter.grad is None else kept.add_(parameter.grad)
        self._kept.clear()
