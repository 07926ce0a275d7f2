"""The memory that one node holds for its backward, found by running it alone and tracking allocations."""

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from penstock.capture import DispatchMode, storage_id, tensors_in
from penstock.ir import SavedTensors
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
    return _Start.apply(_ANCHOR, [value.detach()])


def memory_of(visited: NodeVisit) -> Memory:
    """The memory of a node that has run before, so that its parameters have gradients and its caches are filled."""
    with AllocationTracker() as tracker:
        # Copies that share memory where the values do, so that the tracker shows which of them are held.
        copies: dict[int, Tensor] = {}
        given = {n: _copy_storage_once(v, copies) if isinstance(v, Tensor) else v for n, v in visited.values.items()}
        copies.clear()  # they would keep memory alive that the node frees
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


def _copy_storage_once(value: Tensor, copies: dict[int, Tensor]) -> Tensor:
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


class AllocationTracker(DispatchMode):
    """Inside, counts the storage of every tensor that an operation makes, until the storage is freed.

    Storage from outside, such as that of parameters, is not counted. Each storage has a number, as its
    address may be used again. Memory that a kernel allocates and frees within one operation is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        """bytes of every storage that is alive, by its number"""
        self.bytes = self.peak = 0
        self._numbers: dict[int, int | None] = {}
        self._finalizers: list[Any] = []
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in tensors_in((args, kwargs)):
            self._track(tensor, is_own=False)
        result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            self._track(tensor, is_own=True)
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for finalizer in self._finalizers:
            finalizer.detach()

    def number(self, tensor: Any) -> int | None:
        """The number of a tensor's storage; None if it is from outside."""
        return self._numbers.get(storage_id(tensor)) if isinstance(tensor, Tensor) else None

    def _track(self, tensor: Tensor, is_own: bool) -> None:
        identity = storage_id(tensor)
        # Below 0: a sparse tensor, or another one without plain storage.
        if identity in self._numbers or identity < 0:
            return
        storage = tensor.untyped_storage()
        finalizer = weakref.finalize(storage, self._freed, identity)
        finalizer.atexit = False
        self._finalizers.append(finalizer)
        self._numbers[identity] = None
        if is_own:
            self._count += 1
            self._numbers[identity] = self._count
            self.alive[self._count] = storage.nbytes()
            self.bytes += storage.nbytes()
            self.peak = max(self.peak, self.bytes)

    def _freed(self, identity: int) -> None:
        number = self._numbers.pop(identity)
        if number is not None:
            self.bytes -= self.alive.pop(number)
