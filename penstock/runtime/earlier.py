"""Earlier: gradients and buffers as they were, kept until a step has succeeded: one that fails leaves no trace."""

from collections.abc import Iterable

from torch import Tensor, nn

from penstock.runtime.earlier_state import EarlierState, Place

Kept = dict[nn.Parameter, Tensor | None]


class Earlier:
    """What the gradients, and the buffers in some `places`, were before a step.

    Those of `apart` are put away, because what the step adds to them is summed over other ranks by itself. The others
    are added to in place, as in plain training, which gives the same bits; where they are there already a copy is kept.
    """

    def __init__(
        self,
        apart: Iterable[nn.Parameter],
        others: Iterable[nn.Parameter],
        restores: bool,
        places: Iterable[Place] = (),
    ) -> None:
        """Without `restores` no copy is kept, and a step that fails drops all gradients."""
        self._state = EarlierState(places if restores else ())
        self._apart = tuple(dict.fromkeys(apart))
        self._others = tuple(parameter for parameter in dict.fromkeys(others) if parameter not in set(self._apart))
        self._restores = restores
        self._put_away: Kept = {}
        self._copies: Kept = {}
        self._room: dict[nn.Parameter, Tensor] = {}

    def begin(self) -> None:
        """A step is about to add to the gradients."""
        for parameter in self._apart:
            self._put_away[parameter], parameter.grad = parameter.grad, None
        if self._restores:
            self._copies = {parameter: self._copy(parameter) for parameter in self._others}
        self._state.begin()

    def _copy(self, parameter: nn.Parameter) -> Tensor | None:
        """What is there, in memory that is used again by later steps: new memory would cost more than the copy."""
        gradient, room = parameter.grad, self._room.get(parameter)
        if gradient is None:
            return None
        if room is None or _form(room) != _form(gradient) or gradient.is_sparse:
            self._room[parameter] = room = gradient.detach().clone()
            return room
        return room.copy_(gradient.detach())

    def add(self) -> None:
        """The step has succeeded: what was put away is added to what it brought."""
        for parameter, kept in self._put_away.items():
            if kept is not None:
                parameter.grad = kept if parameter.grad is None else kept.add_(parameter.grad)
        self._forget()
        self._state.forget()

    def restore(self) -> None:
        """The step has failed: gradients and buffers are again what they were before it."""
        self._state.restore()
        for parameter, kept in self._put_away.items():
            parameter.grad = kept if self._restores else None
        for parameter in self._others:
            _restore(parameter, self._copies.get(parameter))
        self._forget()

    def _forget(self) -> None:
        self._put_away, self._copies = {}, {}


def _form(tensor: Tensor) -> tuple[object, ...]:
    return type(tensor), tensor.dtype, tensor.device, tensor.layout, tensor.shape


def _restore(parameter: nn.Parameter, kept: Tensor | None) -> None:
    if kept is None:
        parameter.grad = None
    elif parameter.grad is None or _form(parameter.grad) != _form(kept) or kept.is_sparse:
        parameter.grad = kept.clone()
    else:
        # In place: whoever holds on to the gradient, as flat buffers do, sees it restored.
        parameter.grad.copy_(kept)
