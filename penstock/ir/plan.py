"""Plan: the choices and the prediction, saved to train by and to load again."""

import math
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
from penstock.ir.schedule import Schedule
from penstock.ir.trace import Trace

_TOLERANCE = 1e-9
_COLUMNS = ("stage", "rank", "nodes", "forward", "backward", "activations", "parameters", "first node")


@dataclass(frozen=True)
class Choices:
    """The words that led to a plan, as the user types them, and which stages recompute their activations."""

    partitioner: str
    schedule: str
    recompute: tuple[bool, ...]


@dataclass(frozen=True)
class Prediction:
    """The summary of a predicted Trace; with this partition and placement no order is faster than `lower_bound`."""

    makespan: float
    bubble: float
    span: float
    span_bubble: float
    peaks: tuple[int, ...]
    """most bytes held, per rank"""
    lower_bound: float

    def __post_init__(self) -> None:
        for name in ("makespan", "span", "lower_bound"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise PlanError(f"{name.replace('_', ' ')} must be finite seconds, 0 or more", seconds=value)
        if max(self.span, self.lower_bound) > self.makespan * (1 + _TOLERANCE):
            raise PlanError(
                "neither span nor lower bound can exceed the makespan",
                span=self.span,
                lower_bound=self.lower_bound,
                makespan=self.makespan,
            )
        for share in (self.bubble, self.span_bubble):
            if not -_TOLERANCE <= share <= 1.0:
                raise PlanError("a bubble is a share between 0 and 1", bubble=share)
        if any(peak < 0 for peak in self.peaks):
            raise PlanError("peak bytes must be 0 or more", peaks=self.peaks)

    @classmethod
    def of(cls, trace: Trace, lower_bound: float) -> "Prediction":
        """The summary of a trace, with what was proven about every other order."""
        peaks = tuple(trace.peak_bytes(rank) for rank in range(trace.num_ranks))
        return cls(trace.makespan, trace.bubble, trace.span, trace.span_bubble, peaks, lower_bound)

    def peak_bytes(self, rank: int) -> int:
        """The most bytes that the rank holds at any time."""
        if not 0 <= rank < len(self.peaks):
            raise PlanError("no such rank", rank=rank, ranks=len(self.peaks))
        return self.peaks[rank]


@dataclass(frozen=True)
class Plan:
    """How one model is trained as a pipeline, and how long a step will take.

    `graph` and `costs` are those of one microbatch.
    """

    graph: Graph
    partition: Partition
    schedule: Schedule
    choices: Choices
    costs: StageCosts
    cluster: Cluster
    predicted: Prediction

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

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        # The codec lists every noun, this one too, so it cannot be imported above.
        from penstock.ir import codec

        codec.save(self, path)

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read a plan that `save` wrote."""
        from penstock.ir import codec

        return codec.load(path, cls)

    def __str__(self) -> str:
        rows = [self._row(stage) for stage in range(self.num_stages)]
        return "\n".join((*self._headline(), "", *_aligned([_COLUMNS, *rows])))

    def _headline(self) -> Iterable[str]:
        seen, recomputed = self.predicted, sum(self.choices.recompute)
        yield (
            f"{self.num_stages} stages ({self.choices.partitioner}) on {self.num_ranks} ranks, schedule "
            f"{self.choices.schedule}, {self.num_microbatches} microbatches, {recomputed or 'no'} stages recomputed"
        )
        yield f"step {_seconds(seen.makespan)}, bubble {seen.bubble:.1%}, at best {_seconds(seen.lower_bound)}"
        yield "peak per rank: " + ", ".join(map(_bytes, seen.peaks))

    def _row(self, stage: int) -> tuple[str, ...]:
        nodes, costs = self.partition.stages[stage], self.costs
        return (
            str(stage),
            str(self.schedule.placement[stage]),
            str(len(nodes)),
            _seconds(costs.forward[stage]),
            _seconds(costs.backward[stage]),
            _bytes(costs.activation_bytes[stage]),
            _bytes(costs.state[stage].parameters),
            nodes[0],
        )


def _aligned(table: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join((*map(str.rjust, row[:-1], widths), row[-1])) for row in table]


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"
