"""Steps compiled once per kind of batch: the lowered program, what the ranks must agree on, and each rank's calls."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.capture import Recording
from penstock.ir import Cuts, Plan, Program, prune_gradients
from penstock.passes import lower, verify
from penstock.runtime.compile import Edges, RankProgram, compile_rank
from penstock.runtime.stage_runner import StageRunner
from penstock.runtime.sync import Agreement
from penstock.runtime.transports import Transport
from penstock.stages import Ownership

Roots = tuple[str, ...]
"""the values of a microbatch that its loss is computed from"""


@dataclass(frozen=True)
class CompiledStep:
    """A step that is ready to run on any batch of its kind."""

    is_training: bool
    recordings: tuple[Recording, ...]
    """kept, because the cache compares their ids"""
    roots: tuple[Roots, ...]
    program: Program
    agreement: Agreement
    ranks: tuple[RankProgram, ...]
    """one per rank of this process"""

    def clear(self) -> None:
        """Drop everything that an interrupted step has left behind."""
        for rank in self.ranks:
            rank.clear()


class StepCache:
    """Compiles the steps of one plan, each kind once."""

    def __init__(
        self, plan: Plan, ranks: Sequence[int], runner: StageRunner, transport: Transport, passes: Sequence[str]
    ) -> None:
        self._plan, self._ranks, self._runner, self._transport = plan, ranks, runner, transport
        self._passes = tuple(passes)
        self._owners = Ownership(plan.graph, plan.partition)
        self._steps: dict[tuple[object, ...], CompiledStep] = {}
        self._edges: dict[tuple[int, Roots, bool], Edges] = {}

    def get(self, is_training: bool, recordings: tuple[Recording, ...], roots: tuple[Roots, ...]) -> CompiledStep:
        """The compiled step for microbatches with these recordings and roots."""
        key = (is_training, roots, *map(id, recordings))
        if key not in self._steps:
            self._steps[key] = self._compile(is_training, recordings, roots)
        return self._steps[key]

    def __iter__(self) -> Iterator[CompiledStep]:
        """The steps compiled so far."""
        return iter(self._steps.values())

    def _compile(self, is_training: bool, recordings: tuple[Recording, ...], roots: tuple[Roots, ...]) -> CompiledStep:
        pairs = zip(recordings, roots, strict=True)
        edges = [self._crossings(recording, own, is_training) for recording, own in pairs]
        # An edge exists if any microbatch has it, and carries gradients if it does for any microbatch.
        every = {edge for crossings in edges for edge in crossings}
        with_gradients = {edge for crossings in edges for edge, crossing in crossings.items() if crossing.gradients}
        cuts = Cuts.of(self._plan.num_stages, every, every - with_gradients)
        schedule = self._plan.schedule.first(len(edges))
        if is_training:
            program = lower(schedule, cuts=cuts, passes=self._passes)
            verify(program)
        else:
            program = lower(schedule.forwards(), cuts=cuts, passes=("add_transfers", "hoist_receives"))
        ranks = tuple(compile_rank(program, rank, edges, self._runner, self._transport) for rank in self._ranks)
        name = f"{'train' if is_training else 'eval'} on {len(edges)} microbatches"
        agreement = Agreement.of_step(program, edges, name)
        return CompiledStep(is_training, recordings, roots, program, agreement, ranks)

    def _crossings(self, recording: Recording, roots: Roots, is_training: bool) -> Edges:
        key = (id(recording), roots, is_training)
        if key not in self._edges:
            adding = recording.nodes_adding_loss if is_training else ()
            graph = prune_gradients(recording.graph, roots if is_training else (), adding)
            partition = self._owners.fit(graph)
            self._edges[key] = {(c.producer, c.consumer): c for c in partition.crossings(graph)}
        return self._edges[key]
