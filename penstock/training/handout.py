"""Handout: a batch that only pipeline rank 0 was given, with the recordings that hold for it, on every rank.

Rank 0 looks for the recordings. Where it has met the same ones in a batch of the same structure before, the other ranks
take theirs by number, and are sent only the tensors that their stages read. Else they get all of it, and record too.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from penstock.errors import PenstockError, RunError
from penstock.ir.containers import leaves, named_inputs
from penstock.ir.plan import Plan
from penstock.runtime.delivery import Delivery, read_header, write_header
from penstock.split.ownership import Ownership
from penstock.training.holdings import Holdings
from penstock.training.load import Met

Batch = tuple[Any, Any, Any]
Meet = Callable[[Batch, tuple[Any, ...] | None], Met]


class Way(NamedTuple):
    """A kind of batch that was met before."""

    recordings: tuple[Any, ...]
    names: tuple[str, ...]
    """of every tensor of the batch in order; those of the target have none"""


class Handout:
    """Brings batches from rank 0 to those that need parts of them; all ranks number the ways alike."""

    def __init__(self, holdings: Holdings, plan: Plan, meet: Meet) -> None:
        """`meet` cuts a batch, and finds its recordings unless they are given."""
        self._holdings, self._plan, self._meet = holdings, plan, meet
        self._delivery = Delivery(holdings.crew, holdings.device)
        self._ways: list[Way] = []
        self._numbers: dict[tuple[object, ...], int] = {}

    def hand_out(self, batch: Batch) -> Met:
        """The microbatches and recordings, on every rank; what a rank does not need is memory without content."""
        return self._given(batch) if self._holdings.crew.rank == 0 else self._taken()

    def _given(self, batch: Batch) -> Met:
        with self._told():
            header, tensors = write_header(batch)
            own = _arranged(read_header(header)[0](tensors))
            met = self._meet(own, None)
        number = self._numbers.setdefault((header, *map(id, met.recordings)), len(self._ways))
        note = json.dumps({"way": number, "batch": header})
        self._delivery.give(note, tensors, lambda rank: self._wanted(number, rank))
        self._learn(number, met, own)
        return met

    def _taken(self) -> Met:
        note = json.loads(self._delivery.take_note())
        if "refused" in note:
            raise RunError(note["refused"], hint=note["hint"], report=note["report"], **note["values"])
        number = note["way"]
        build, buffers = read_header(note["batch"])
        own = _arranged(build(self._delivery.take(buffers, self._wanted(number, self._holdings.crew.rank))))
        met = self._meet(own, self._ways[number].recordings if number < len(self._ways) else None)
        self._learn(number, met, own)
        return met

    @contextmanager
    def _told(self) -> Iterator[None]:
        """A batch that rank 0 refuses is refused by all, in the same words."""
        try:
            yield
        except PenstockError as error:
            values = {name: str(value) for name, value in error.values.items()}
            note = {"refused": error.problem, "hint": error.hint, "report": error.report, "values": values}
            self._delivery.give(json.dumps(note), (), lambda rank: ())
            raise

    def _learn(self, number: int, met: Met, batch: Batch) -> None:
        if number == len(self._ways):
            named = named_inputs(self._holdings.captured.model.forward, batch[0], batch[1])
            names = {id(leaf): name for name, leaf in named.items()}
            tensors = (leaf for leaf in leaves(batch) if isinstance(leaf, Tensor))
            self._ways.append(Way(met.recordings, tuple(names.get(id(leaf), "") for leaf in tensors)))

    def _wanted(self, number: int, rank: int) -> set[int] | None:
        """The places of the tensors that a rank needs; None: all of them, the way is new."""
        if number == len(self._ways):
            return None
        way, is_last = self._ways[number], self._plan.schedule.placement[self._plan.num_stages - 1] == rank
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


def _arranged(batch: Any) -> Batch:
    return tuple(batch[0]), dict(batch[1]), batch[2]
