"""The memory that one node holds for its backward, found by running it alone and tracking allocations."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from penstock.ir import SavedTensors
from penstock.measure.allocations import AllocationTracker
from penstock.measure.measured_model import NodeVisit

StorageNumbers = dict[str, int | None]
_ANCHOR = torch.zeros(0, requires_grad=True)
"""a custom Function records a node only if a tensor argument requires a gradient"""


class Memory(NamedTuple):
    """The tensors that a node saves, and the peak of memory while it ran, without its inputs."""

    holds: SavedTensors = SavedTensors()
    peak: int = 0


class _Start(Function):
    """Starts a graph without keeping the value it starts with, as the boundary of a stage does."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, value: list[Tensor]) -> Tensor:
        # In a list: autograd would return an argument as a view of itself.
        return value[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None


def _started(value: Tensor) -> Tensor:
    started: Tensor = _Start.apply(_ANCHOR, [value.detach()])  # type: ignore[no-untyped-call]
    return started


def memory_of(visited: NodeVisit) -> Memory:
    """The memory of a node that has run before, so that its parameters have gradients and its caches are filled."""
    with AllocationTracker() as tracker:
        given = _in_own_memory(visited.values)
        prepared = visited.subject.prepare_node(visited.node.name, given, True)
        incoming = {name: tracker.number(value) for name, value in given.items()}
        given.clear()
        before = tracker.peak = tracker.bytes
        run = prepared()
        del prepared
        outputs = run.take_outputs()
        made = {name: tracker.number(value) for name, value in outputs.items()}
        gradients = visited.gradients(outputs)
        coming = {name: tracker.number(gradient) for name, gradient in gradients.items()}
        outputs.clear()
        kept = _without(tracker.alive, coming.values())
        run.input_grad(gradients)
        gradients.clear()
        late = dict(tracker.alive)
        run.weight_grad()
        peak = tracker.peak - before
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
    """Copies that share memory where the values do, so that the tracker shows which of them are held."""
    copies: dict[int, Tensor] = {}
    return {name: _copied(value, copies) if isinstance(value, Tensor) else value for name, value in values.items()}


def _copied(value: Tensor, copies: dict[int, Tensor]) -> Tensor:
    if value.layout is not torch.strided:
        return _started(value.detach().clone()) if value.requires_grad else value.detach().clone()
    storage = value.untyped_storage()
    if storage._cdata not in copies:
        # The whole storage, as elements of this dtype.
        whole = value.detach().as_strided((storage.nbytes() // value.element_size(),), (1,), 0)
        copies[storage._cdata] = whole.clone()
    copy = copies[storage._cdata].view(value.dtype).as_strided(value.shape, value.stride(), value.storage_offset())
    return _started(copy) if value.requires_grad else copy


def _without(alive: Mapping[int, int], numbers: Iterable[int | None]) -> dict[int, int]:
    others = set(numbers)
    return {number: size for number, size in alive.items() if number not in others}


def _present(numbers: StorageNumbers, alive: Mapping[int, int]) -> tuple[str, ...]:
    return tuple(name for name, number in numbers.items() if number is not None and number in alive)
