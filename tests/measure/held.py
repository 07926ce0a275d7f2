"""Held: what real stages hold for their backward: all memory that is made while they run and still there."""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.ir import Partition
from penstock.measure import MeasuredModel
from penstock.stages import Stage, StageRun, split

Values = dict[str, Any]


class Held(NamedTuple):
    """Bytes of one stage: until the backward, between input and weight gradient, and after that."""

    kept: int
    late: int
    rest: int


class Storages(TorchDispatchMode):
    """The memory that operations inside have made, as long as it is there."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note((args, kwargs), is_made=False)
        result = func(*args, **(kwargs or {}))
        self._note(result, is_made=True)
        return result

    def _note(self, things: Any, is_made: bool) -> None:
        """What comes from outside has no size here; places are free again when what was there is gone."""
        for tensor in (leaf for leaf in tree_leaves(things) if isinstance(leaf, Tensor)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._sizes:
                self._sizes[storage._cdata] = storage.nbytes() if is_made else 0
                weakref.finalize(storage, self._sizes.pop, storage._cdata)

    def bytes(self, *without: Values) -> int:
        """All that is there but for the memory of some values."""
        others = {_place(value) for values in without for value in values.values()}
        return sum(size for place, size in self._sizes.items() if place not in others)


def held(measured: MeasuredModel, partition: Partition, is_split: bool, recomputes: bool = False) -> list[Held]:
    """What all stages hold, run one after the other; the first time, which makes gradients, does not count."""
    stages = split(measured._captured, partition)
    for stage in stages:
        stage.recomputes = recomputes
    with measured.isolated():
        _run(measured, stages, partition, is_split)
        return _run(measured, stages, partition, is_split)


def _run(measured: MeasuredModel, stages: tuple[Stage, ...], partition: Partition, is_split: bool) -> list[Held]:
    values: Values = {}
    found = []
    for number, stage in enumerate(stages):
        crossings = [crossing for crossing in partition.crossings(measured.graph) if crossing.consumer == number]
        incoming = {value.name: values[value.name] for crossing in crossings for value in crossing.values}
        counted, left = _stage(measured, stage, incoming, is_split)
        found.append(counted)
        values |= left
    return found


def _stage(measured: MeasuredModel, stage: Stage, values: Values, is_split: bool) -> tuple[Held, Values]:
    inputs, needs = measured.inputs(), {name: value.requires_grad for name, value in values.items()}
    with Storages() as storages:
        incoming = {name: value.detach().clone().requires_grad_(needs[name]) for name, value in values.items()}
        run = StageRun(stage, measured._captured.example_recording, inputs, incoming, is_split)
        incoming.clear()
        left = run.take_outputs()
        copies = {name: value.detach().clone() for name, value in left.items()}
        needs = {name: measured.graph.spec(name).requires_grad and value.requires_grad for name, value in left.items()}
        is_last = stage.stage_index == stage._partitioned.partition.num_stages - 1
        roots = [name for name in left if needs[name] and (not is_last or name in measured.roots)]
        gradients = {name: torch.ones_like(left[name], requires_grad=False) for name in roots}
        left.clear()
        kept = storages.bytes(copies, gradients)
        run.input_grad(gradients) if is_split else run.backward(gradients)
        gradients.clear()
        late = storages.bytes(copies)
        run.weight_grad()
        del run
        rest = storages.bytes(copies)
    return Held(kept, late, rest), {name: copy.requires_grad_(needs[name]) for name, copy in copies.items()}


def _place(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
