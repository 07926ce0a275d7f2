"""FirstInputs: a batch that only pipeline rank 0 was given, with the recordings that hold for it, on every rank.

Rank 0 looks for the recordings. Where it has met the same ones in a batch of the same structure before, the other ranks
take theirs by number, and are sent only the tensors that their stages read. Else they get all of it, and record too.
"""

from typing import Any, NamedTuple

from torch import Tensor

from penstock.ir import leaves, named_inputs
from penstock.runtime.batch_cutter import BatchCutter
from penstock.runtime.delivery import Delivery, read_header, write_header
from penstock.runtime.model_part import ModelPart
from penstock.runtime.step_data import CutBatch
from penstock.stages import Ownership

Batch = tuple[Any, Any, Any]


class Way(NamedTuple):
    """A kind of batch that was met before."""

    recordings: tuple[Any, ...]
    names: tuple[str, ...]
    """of every tensor of the batch in order; those of the target have none"""
    header: str
    """how the batch is built"""


class Offer(NamedTuple):
    """A batch as rank 0 is about to hand it out: the number of its way, and what it consists of."""

    number: int
    header: str
    tensors: list[Tensor]
    batch: Batch
    cut: CutBatch


class FirstInputs:
    """Brings batches from rank 0 to those that need parts of them; all ranks number the ways alike."""

    def __init__(self, part: ModelPart, cutter: BatchCutter) -> None:
        self._part, self._plan, self._cutter = part, cutter.plan, cutter
        self._delivery = Delivery(part.groups, part.device)
        self._ways: list[Way] = []
        self._numbers: dict[tuple[object, ...], int] = {}
        self._places: dict[tuple[int, int], set[int]] = {}
        self._new: Way | None = None

    def offer(self, batch: Batch) -> Offer:
        """On rank 0: look at the batch; nothing is sent yet."""
        header, tensors = write_header(batch)
        own = _arranged(read_header(header)[0](tensors))
        found = self._cutter.cut(own)
        number = self._numbers.get(_kind(header, found), len(self._ways))
        return Offer(number, header, tensors, own, found)

    @property
    def num_known(self) -> int:
        """How many ways all ranks know."""
        return len(self._ways)

    def is_new(self, number: int) -> bool:
        """Whether a way is met for the first time."""
        return number == len(self._ways)

    def give(self, offer: Offer) -> CutBatch:
        """On rank 0: send what the others need."""
        if self.is_new(offer.number):
            self._part.groups.broadcast_text(offer.header, 0)
        self._delivery.give(offer.tensors, lambda rank: self._wanted(offer.number, rank))
        self._look_at(offer.number, offer.header, offer.cut, offer.batch)
        return offer.cut

    def take(self, number: int) -> CutBatch:
        """On the other ranks: microbatches and recordings; what a rank does not need is memory without content."""
        groups = self._part.groups
        header = groups.broadcast_text("", 0) if self.is_new(number) else self._ways[number].header
        build, buffers = read_header(header)
        own = _arranged(build(self._delivery.take(buffers, self._wanted(number, groups.rank))))
        found = self._cutter.cut(own, None if self.is_new(number) else self._ways[number].recordings)
        self._look_at(number, header, found, own)
        return found

    def learn(self) -> None:
        """All ranks have agreed on what was new about the last batch: from now on it is known."""
        if self._new is not None:
            self._numbers[_kind(self._new.header, self._new)] = len(self._ways)
            self._ways.append(self._new)
            self._new = None

    def _look_at(self, number: int, header: str, found: CutBatch, batch: Batch) -> None:
        self._new = None
        if self.is_new(number):
            named = named_inputs(self._part.captured.model.forward, batch[0], batch[1])
            names = {id(leaf): name for name, leaf in named.items()}
            tensors = (leaf for leaf in leaves(batch) if isinstance(leaf, Tensor))
            self._new = Way(found.recordings, tuple(names.get(id(leaf), "") for leaf in tensors), header)

    def _wanted(self, number: int, rank: int) -> set[int] | None:
        """The places of the tensors that a rank needs; None: all of them, the way is new."""
        if self.is_new(number):
            return None
        if (number, rank) not in self._places:
            self._places[number, rank] = self._found_places(self._ways[number], rank)
        return self._places[number, rank]

    def _found_places(self, way: Way, rank: int) -> set[int]:
        is_last = self._plan.schedule.placement[self._plan.num_stages - 1] == rank
        read = {name for recording in way.recordings for name in self._read(recording, rank, is_last)}
        return {place for place, name in enumerate(way.names) if name in read or (is_last and not name)}

    def _read(self, recording: Any, rank: int, is_last: bool) -> set[str]:
        """The inputs that the stages of a rank read; the last one also counts labels, and returns what it was given."""
        graph = recording.graph
        runs = Ownership(self._plan.graph, self._plan.partition).fit(graph).runs(graph)
        nodes = [node for stage in self._plan.schedule.placement.stages[rank] for node in runs[stage]]
        if is_last:
            nodes += [node for node in graph.nodes if node.from_inputs]
        return {name for node in nodes for name in node.reads} | set(graph.outputs if is_last else ())


def _kind(header: str, found: CutBatch | Way) -> tuple[object, ...]:
    return header, *map(id, found.recordings)


def _arranged(batch: Any) -> Batch:
    return tuple(batch[0]), dict(batch[1]), batch[2]
