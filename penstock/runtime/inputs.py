"""Splits the batch of a step into microbatches, and sends it from rank 0 to the others if only rank 0 has it."""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from penstock.capture import Microbatch, Recording, split_batch
from penstock.ir import Plan, leaves, named_inputs, named_leaves
from penstock.runtime.broadcast import flatten_structure, read_structure
from penstock.runtime.groups import ProcessGroups
from penstock.runtime.model_part import ModelPart
from penstock.runtime.sync import checksum
from penstock.stages import Ownership

INPUTS = ("all", "first")
"""which ranks are given the batch"""
Batch = tuple[Any, Any, Any]
"""args, kwargs and target of a step"""
_TARGET = "target"


class SplitBatch(NamedTuple):
    """A batch as microbatches, with the recording and the named input tensors of each."""

    microbatches: tuple[Microbatch, ...]
    recordings: tuple[Recording, ...]
    inputs: tuple[dict[str, Any], ...]


class BatchSplitter:
    """Splits batches into the number of microbatches of a plan."""

    def __init__(self, part: ModelPart, plan: Plan, split: Mapping[str, int | None]) -> None:
        """`split`: see `split_batch`."""
        self._part, self._split, self.plan = part, dict(split), plan
        self._num_microbatches = plan.num_microbatches

    def arranged(self, batch: Batch) -> Batch:
        """The batch with the target among the arguments, if the model's forward takes a `target`."""
        args, kwargs, target = batch
        if target is None or _TARGET not in inspect.signature(self._part.captured.model.forward).parameters:
            return batch
        return args, {**kwargs, _TARGET: target}, None

    def split(self, batch: Batch, recordings: tuple[Recording, ...] | None = None) -> SplitBatch:
        """Split a batch, and find the recording of each microbatch unless they are given."""
        if not self._part.has_weights:
            self._part.check_weights()
        for stage in self._part.stages.values():
            stage.check_state()
        captured, (args, kwargs, target) = self._part.captured, batch
        parts = split_batch(captured.model.forward, args, kwargs, target, self._num_microbatches, self._split)
        if recordings is not None:
            return SplitBatch(parts, recordings, tuple(captured.inputs(part.args, part.kwargs) for part in parts))
        found, inputs = zip(*captured.recordings((part.args, part.kwargs) for part in parts), strict=True)
        return SplitBatch(parts, found, inputs)

    def checksum(self, batch: SplitBatch) -> int:
        """A checksum of the batch; arguments by position and by name give the same checksum."""
        forward = self._part.captured.model.forward
        return checksum(
            {**named_inputs(forward, part.args, part.kwargs), **dict(named_leaves(part.target, _TARGET))}
            for part in batch.microbatches
        )


class BatchKind(NamedTuple):
    """Batches of one structure and one sequence of recordings."""

    recordings: tuple[Recording, ...]
    input_names: tuple[str, ...]
    """of every tensor of the batch in order; "" for those of the target"""
    structure: str


class Offer(NamedTuple):
    """A batch that rank 0 is about to send: the number of its kind, and its content."""

    number: int
    structure: str
    tensors: list[Tensor]
    batch: Batch
    split: SplitBatch


class BatchSender:
    """Sends batches from rank 0 to the ranks that need parts of them.

    A batch of a new kind is sent whole, and every rank records the model. A kind has the same
    number on all ranks: for a known kind the other ranks find their recordings by its number, and are sent only the
    tensors that their stages read.
    """

    def __init__(self, part: ModelPart, splitter: BatchSplitter) -> None:
        self._part, self._plan, self._splitter = part, splitter.plan, splitter
        self._kinds: list[BatchKind] = []
        self._numbers: dict[tuple[object, ...], int] = {}
        self._needed: dict[tuple[int, int], set[int]] = {}
        self._new: BatchKind | None = None

    @property
    def num_kinds(self) -> int:
        """The number of kinds that all ranks have agreed on."""
        return len(self._kinds)

    def offer(self, batch: Batch) -> Offer:
        """On rank 0: prepare a batch; nothing is sent yet."""
        structure, tensors = flatten_structure(batch)
        # Rebuilt from what is sent, so that rank 0 trains on the same structure as the other ranks.
        own = _as_batch(read_structure(structure)[0](tensors))
        split = self._splitter.split(own)
        number = self._numbers.get(_key(structure, split.recordings), len(self._kinds))
        return Offer(number, structure, tensors, own, split)

    def send(self, offer: Offer) -> SplitBatch:
        """On rank 0: send each rank the tensors that it needs."""
        if offer.number == len(self._kinds):
            self._part.groups.broadcast_text(offer.structure, 0)
        send_tensors(self._part.groups, offer.tensors, lambda rank: self._needed_by(offer.number, rank))
        self._note_kind(offer.number, offer.structure, offer.split, offer.batch)
        return offer.split

    def receive(self, number: int) -> SplitBatch:
        """On the other ranks: receive a batch; the tensors that this rank does not need are uninitialised memory."""
        groups, is_new = self._part.groups, number == len(self._kinds)
        structure = groups.broadcast_text("", 0) if is_new else self._kinds[number].structure
        build, buffers = read_structure(structure)
        buffers = [buffer.to(self._part.device) for buffer in buffers]
        batch = _as_batch(build(receive_tensors(groups, buffers, self._needed_by(number, groups.rank))))
        split = self._splitter.split(batch, None if is_new else self._kinds[number].recordings)
        self._note_kind(number, structure, split, batch)
        return split

    def commit(self) -> None:
        """Register the kind of the last batch; call this once all ranks have agreed on its step."""
        if self._new is not None:
            self._numbers[_key(self._new.structure, self._new.recordings)] = len(self._kinds)
            self._kinds.append(self._new)
            self._new = None

    def _note_kind(self, number: int, structure: str, split: SplitBatch, batch: Batch) -> None:
        self._new = None
        if number == len(self._kinds):
            named = named_inputs(self._part.captured.model.forward, batch[0], batch[1])
            names = {id(leaf): name for name, leaf in named.items()}
            tensors = (leaf for leaf in leaves(batch) if isinstance(leaf, Tensor))
            self._new = BatchKind(split.recordings, tuple(names.get(id(leaf), "") for leaf in tensors), structure)

    def _needed_by(self, number: int, rank: int) -> set[int] | None:
        """The indices of the tensors that a rank needs; None: all of them, because the kind is new."""
        if number == len(self._kinds):
            return None
        if (number, rank) not in self._needed:
            kind, placement = self._kinds[number], self._plan.schedule.placement
            is_last = placement[self._plan.num_stages - 1] == rank
            read: set[str] = set()
            for recording in kind.recordings:
                graph = recording.graph
                runs = Ownership(self._plan.graph, self._plan.partition).fit(graph).runs(graph)
                nodes = [node for stage in placement.stages[rank] for node in runs[stage]]
                if is_last:
                    # The last rank also counts labels and returns outputs, which may be inputs.
                    nodes += [node for node in graph.nodes if node.from_inputs]
                    read.update(graph.outputs)
                read.update(name for node in nodes for name in node.reads)
            names = enumerate(kind.input_names)
            self._needed[number, rank] = {index for index, name in names if name in read or (is_last and not name)}
        return self._needed[number, rank]


def send_tensors(
    groups: ProcessGroups, tensors: Sequence[Tensor], needed_by: Callable[[int], Collection[int] | None]
) -> None:
    """On rank 0: send every rank the tensors with the indices that it needs; None: all of them."""
    works = [
        groups.start(dist.isend, tensors[index], group=groups.group, group_dst=rank)
        for rank in range(1, groups.num_ranks)
        for index in _sent(tensors, needed_by(rank))
    ]
    for work in works:
        groups.wait(work)


def receive_tensors(
    groups: ProcessGroups, buffers: Sequence[Tensor], needed: Collection[int] | None
) -> Sequence[Tensor]:
    """On the other ranks: fill the buffers with the needed tensors; the rest stay uninitialised."""
    indices = _sent(buffers, needed)
    works = [groups.start(dist.irecv, buffers[index], group=groups.group, group_src=0) for index in indices]
    for work in works:
        groups.wait(work)
    return buffers


def _sent(tensors: Sequence[Tensor], needed: Collection[int] | None) -> list[int]:
    return [index for index, tensor in enumerate(tensors) if tensor.numel() and (needed is None or index in needed)]


def _key(structure: str, recordings: Iterable[Recording]) -> tuple[object, ...]:
    return structure, *map(id, recordings)


def _as_batch(structure: Any) -> Batch:
    return tuple(structure[0]), dict(structure[1]), structure[2]
