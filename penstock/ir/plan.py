"""Plan: the choices and the prediction, saved to train by and to load again."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from penstock.errors import PlanError
from penstock.ir.cluster import Cluster
from penstock.ir.costs import StageCosts
from penstock.ir.cuts import Cuts
from penstock.ir.graph import Graph
from penstock.ir.partition import Partition
from penstock.ir.prediction import Prediction
from penstock.ir.schedule import Schedule
from penstock.ir.search import UNSEARCHED, Choices, Search
from penstock.ir.units import aligned, bytes_text, counted, percent_text, printable, seconds_text

_COLUMNS = ("stage", "rank", "nodes", "forward", "backward", "activations", "parameters", "first node")


@dataclass(frozen=True)
class Plan:
    """How one model is trained as a pipeline, and how long a step will take.

    `graph` and `costs` are those of one microbatch; the costs are those on the ranks, the slowness of each included.
    """

    graph: Graph
    partition: Partition
    schedule: Schedule
    choices: Choices
    costs: StageCosts
    cluster: Cluster
    predicted: Prediction
    search: Search = UNSEARCHED
    """what else was looked at, and why this was chosen"""

    def __post_init__(self) -> None:
        self.partition.check(self.graph)
        stages = {
            "partition": self.partition.num_stages,
            "schedule": self.schedule.num_stages,
            "costs": self.costs.num_stages,
            "recompute": len(self.choices.recompute),
        }
        if len(set(stages.values())) > 1:
            raise PlanError("the parts of a plan differ in the number of stages", hint="", **stages)
        ranks = {
            "schedule": self.schedule.num_ranks,
            "cluster": self.cluster.ranks,
            "predicted": len(self.predicted.peaks),
        }
        if len(set(ranks.values())) > 1:
            raise PlanError("the parts of a plan differ in the number of ranks", hint="", **ranks)

    @cached_property
    def cuts(self) -> Cuts:
        """The edges between stages."""
        return self.partition.cuts(self.graph)

    @property
    def num_ranks(self) -> int:
        """How many ranks the plan needs."""
        return self.schedule.num_ranks

    @property
    def num_stages(self) -> int:
        """How many stages the model is cut into."""
        return self.partition.num_stages

    @property
    def num_microbatches(self) -> int:
        """How many microbatches a batch is cut into."""
        return self.schedule.num_microbatches

    @property
    def lower_bound(self) -> float:
        """Seconds that no order of this partition and placement can undercut, certified."""
        return self.predicted.lower_bound

    def costs_on(self, cluster: Cluster) -> StageCosts:
        """What the stages cost on ranks of which others are slow."""
        if cluster.slowness == self.cluster.slowness:
            return self.costs
        there, here = (each.slowness_of(self.schedule.placement) for each in (cluster, self.cluster))
        return self.costs.times([new / old for new, old in zip(there, here, strict=True)])

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        # The codec lists every noun, this one too, so it cannot be imported above.
        from penstock.ir.codec import save_record

        save_record(self, path)

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read a plan that `save` wrote."""
        from penstock.ir.codec import load_record

        return load_record(path, cls)

    def __str__(self) -> str:
        rows = [self._row(stage) for stage in range(self.num_stages)]
        return printable("\n".join((*self._headline(), "", *aligned([_COLUMNS, *rows]))))

    def describe(self) -> str:
        """The plan, why it was chosen, and what else was looked at, in words and tables."""
        parts = (str(self), "\n".join(self.search.reasons), str(self.search))
        return printable("\n\n".join(part for part in parts if part))

    def _headline(self) -> Iterable[str]:
        seen, recomputed = self.predicted, sum(self.choices.recompute)
        words = (
            f"{counted(self.num_stages, 'stage')} ({self.choices.partitioner}) on {counted(self.num_ranks, 'rank')}",
            f"schedule {self.choices.schedule}",
            counted(self.num_microbatches, "microbatch"),
            f"{counted(recomputed, 'stage') if recomputed else 'no stage'} recomputed",
        )
        yield ", ".join(words)
        step, least = seconds_text(seen.makespan), seconds_text(seen.lower_bound)
        yield f"step {step}, bubble {percent_text(seen.bubble)}, at best {least}"
        yield "peak per rank: " + ", ".join(map(bytes_text, seen.peaks))
        if self.cluster.slowness:
            yield "slowness per rank: " + ", ".join(f"{factor:g}" for factor in self.cluster.slowness)

    def _row(self, stage: int) -> tuple[str, ...]:
        nodes, costs = self.partition.stages[stage], self.costs
        return (
            str(stage),
            str(self.schedule.placement[stage]),
            str(len(nodes)),
            seconds_text(costs.forward[stage]),
            seconds_text(costs.backward[stage]),
            bytes_text(costs.activation_bytes[stage]),
            bytes_text(costs.state[stage].parameters),
            nodes[0],
        )
