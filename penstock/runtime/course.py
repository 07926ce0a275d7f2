"""Course: everything that is prepared once for one kind of step: the program, what crosses, the calls of each rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.ir import Crossing, Cuts, Partition, Plan, Program, Schedule, prune_gradients
from penstock.passes import lower, verify
from penstock.runtime.compile import Prepared, compile_rank
from penstock.runtime.sync import Agreement
from penstock.runtime.transports import Transport
from penstock.stages import Ownership

Edges = Mapping[tuple[int, int], Crossing]
_FORWARD_PASSES = ("add_transfers", "hoist_receives")


@dataclass(frozen=True)
class StepKind:
    """What tells steps apart: whether there is a backward, and what the loss depends on, per microbatch."""

    is_training: bool
    recordings: tuple[Any, ...]
    roots: tuple[tuple[str, ...], ...]

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for steps of one kind; a recording is kept as long as its model is captured."""
        return self.is_training, self.roots, *map(id, self.recordings)


@dataclass(frozen=True)
class Course:
    """A kind of step, ready to be run; it holds on to its recordings, by whose identity it is found again."""

    kind: StepKind
    program: Program
    form: Agreement
    prepared: tuple[Prepared, ...]
    transport: Transport

    def clear(self) -> None:
        """Let go of what an interrupted step has left behind."""
        for prepared in self.prepared:
            prepared.clear()
        self.transport.clear()


class Courses:
    """The courses of one plan, each made once."""

    def __init__(self, plan: Plan, ranks: Sequence[int], player: Any, transport: Any, passes: Sequence[str]) -> None:
        self._plan, self._ranks, self._player, self._transport = plan, ranks, player, transport
        self._passes = tuple(passes)
        self._owners = Ownership(plan.graph, plan.partition)
        self._made: dict[tuple[object, ...], Course] = {}
        self._edges: dict[tuple[int, tuple[str, ...], bool], Edges] = {}

    def of(self, kind: StepKind) -> Course:
        """The course for a kind of step."""
        if kind.key not in self._made:
            self._made[kind.key] = self._make(kind)
        return self._made[kind.key]

    def _make(self, kind: StepKind) -> Course:
        edges = [
            self._edges_of(recording, roots, kind.is_training)
            for recording, roots in zip(kind.recordings, kind.roots, strict=True)
        ]
        schedule = self._plan.schedule.first(len(edges))
        program = self._lowered(schedule, self._cuts(edges), kind.is_training)
        words = f"{'train' if kind.is_training else 'eval'} on {len(edges)} microbatches"
        prepared = tuple(compile_rank(program, rank, edges, self._player, self._transport) for rank in self._ranks)
        return Course(kind, program, Agreement.of_step(program, edges, words), prepared, self._transport)

    def _lowered(self, schedule: Schedule, cuts: Cuts, is_training: bool) -> Program:
        if not is_training:
            return lower(schedule.forwards(), cuts=cuts, passes=_FORWARD_PASSES)
        program = lower(schedule, cuts=cuts, passes=self._passes)
        verify(program)
        return program

    def _edges_of(self, recording: Any, roots: tuple[str, ...], is_training: bool) -> Edges:
        key = (id(recording), roots, is_training)
        if key not in self._edges:
            adding = recording.nodes_adding_loss if is_training else ()
            graph = prune_gradients(recording.graph, roots if is_training else (), adding)
            partition: Partition = self._owners.fit(graph)
            self._edges[key] = {(c.producer, c.consumer): c for c in partition.crossings(graph)}
        return self._edges[key]

    def _cuts(self, edges: Sequence[Edges]) -> Cuts:
        """The edges that any microbatch has; one is without gradient if it is for all of them."""
        every = {edge for crossings in edges for edge in crossings}
        speaking = {edge for crossings in edges for edge, crossing in crossings.items() if crossing.gradients}
        return Cuts.of(self._plan.num_stages, every, every - speaking)
