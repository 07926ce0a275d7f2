"""Memory: what one node holds for its backward, found by running it alone and looking at what stays."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from penstock.ir import SavedTensors
from penstock.measure.ledger import Ledger
from penstock.measure.walk import Situation

Numbers = dict[str, int | None]
_ANCHOR = torch.zeros(0, requires_grad=True)
"""makes a value need a gradient; gets none itself"""


class Memory(NamedTuple):
    """What a node holds, and the most that was there while it ran, what it was given not counted."""

    holds: SavedTensors = SavedTensors()
    peak: int = 0


class _Start(Function):
    """The start of a graph that does not hold the value it starts with, as that of a stage does not."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, value: list[Tensor]) -> Tensor:
        """The value comes in a list, as an argument would not be let out as it is."""
        return value[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None


def _started(value: Tensor) -> Tensor:
    made: Tensor = _Start.apply(_ANCHOR, [value.detach()])  # type: ignore[no-untyped-call]
    return made


def memory_of(situation: Situation) -> Memory:
    """The memory of a node that has run before: its parameters have gradients, and its caches are filled."""
    with Ledger() as ledger:
        given = _in_own_memory(situation.values)
        ready = situation.subject.ready(situation.node.name, given, True)
        incoming = {name: ledger.number(value) for name, value in given.items()}
        given.clear()
        before = ledger.peak = ledger.bytes
        run = ready()
        del ready
        left = run.take_outputs()
        made = {name: ledger.number(value) for name, value in left.items()}
        gradients = situation.gradients(left)
        coming = {name: ledger.number(gradient) for name, gradient in gradients.items()}
        left.clear()
        kept = _without(ledger.alive, coming.values())
        run.input_grad(gradients)
        gradients.clear()
        late = dict(ledger.alive)
        run.weight_grad()
        peak = ledger.peak - before
    values = made | incoming
    return Memory(
        SavedTensors(
            own=sum(_without(kept, values.values()).values()),
            values=_present(values, kept),
            late_own=sum(_without(late, (*values.values(), *coming.values())).values()),
            late_values=_present(values, late),
            late_gradients=_present(coming, late),
        ),
        max(peak, 0),
    )


def _in_own_memory(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copies that share memory exactly where the values do, so that it can be told which of them is held."""
    copies: dict[int, Tensor] = {}
    return {name: _copied(value, copies) if isinstance(value, Tensor) else value for name, value in values.items()}


def _copied(value: Tensor, copies: dict[int, Tensor]) -> Tensor:
    if value.layout is not torch.strided:
        return _started(value.detach().clone()) if value.requires_grad else value.detach().clone()
    storage = value.untyped_storage()
    if storage._cdata not in copies:
        # All of the memory, as far as elements of this type go.
        whole = value.detach().as_strided((storage.nbytes() // value.element_size(),), (1,), 0)
        copies[storage._cdata] = whole.clone()
    own = copies[storage._cdata].view(value.dtype).as_strided(value.shape, value.stride(), value.storage_offset())
    return _started(own) if value.requires_grad else own


def _without(alive: Mapping[int, int], numbers: Iterable[int | None]) -> dict[int, int]:
    others = set(numbers)
    return {number: size for number, size in alive.items() if number not in others}


def _present(numbers: Numbers, alive: Mapping[int, int]) -> tuple[str, ...]:
    return tuple(name for name, number in numbers.items() if number is not None and number in alive)
