"""The choices for one model, with the predicted step and the other candidates of the search."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

from penstock.errors import PlanError
from penstock.ir.action import Kind
from penstock.ir.batch_split_rules import SplitRule
from penstock.ir.cluster import Cluster
from penstock.ir.costs import StageCosts
from penstock.ir.graph import Graph
from penstock.ir.notebook import html_table, paragraph
from penstock.ir.partition import Partition
from penstock.ir.placement import Cuts
from penstock.ir.schedule import Program, Schedule
from penstock.ir.trace import Trace
from penstock.ir.training_state import TrainingState
from penstock.ir.units import align_columns, bytes_text, counted, percent_text, printable, seconds_text

_PLAN_COLUMNS = ("stage", "rank", "nodes", "forward", "backward", "activations", "parameters", "first node")
# fmt: off
_SEARCH_COLUMNS = (
    "step", "bubble", "peak", "messages", "stages", "microbatches", "recomputed", "schedule", "cuts", "why not",
)
_LAYOUT_COLUMNS = (
    "replicas x ranks x tp", "microbatches", "stages", "recomputed", "step", "bubble", "peak", "MFU", "why not",
)
# fmt: on
_TOLERANCE = 1e-9
_SHOWN_PEAKS, _SHOWN_LAYOUTS = 8, 16
ESTIMATED = "estimated"
"""first word of the device of a profile whose seconds were not measured"""


@dataclass(frozen=True)
class Choices:
    """The names of the partitioner and the schedule of a plan, and which stages recompute their activations."""

    partitioner: str
    schedule: str
    recompute: tuple[bool, ...]
    placement: str = "given"
    """the kind of the Placement; "given" if left out"""


@dataclass(frozen=True)
class Prediction:
    """The summary of a predicted Trace; with this partition and placement no order is faster than `lower_bound`."""

    makespan: float
    bubble: float
    span: float
    span_bubble: float
    peaks: tuple[int, ...]
    """peak bytes per rank"""
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
                raise PlanError("a bubble must be a share between 0 and 1", bubble=share)
        if any(peak < 0 for peak in self.peaks):
            raise PlanError("peak bytes must be 0 or more", peaks=self.peaks)

    @classmethod
    def of(cls, trace: Trace, lower_bound: float) -> "Prediction":
        """The summary of a trace, with a proven lower bound for every other order."""
        peaks = tuple(trace.peak_bytes(rank) for rank in range(trace.num_ranks))
        return cls(trace.makespan, trace.bubble, trace.span, trace.span_bubble, peaks, lower_bound)

    def peak_bytes(self, rank: int) -> int:
        """The most bytes that the rank holds at any time."""
        if not 0 <= rank < len(self.peaks):
            raise PlanError("no such rank", rank=rank, ranks=len(self.peaks))
        return self.peaks[rank]


@dataclass(frozen=True)
class Candidate:
    """One plan that the search considered, and why it was not chosen; `lost` is empty for the chosen one."""

    choices: Choices
    num_microbatches: int
    num_messages: int
    predicted: Prediction
    lost: str = ""

    @property
    def row(self) -> tuple[str, ...]:
        """A row of the table of candidates."""
        return (
            seconds_text(self.predicted.makespan),
            percent_text(self.predicted.bubble),
            bytes_text(max(self.predicted.peaks)),
            str(self.num_messages),
            f"{len(self.choices.recompute)} {self.choices.placement}",
            str(self.num_microbatches),
            str(sum(self.choices.recompute)),
            self.choices.schedule,
            self.choices.partitioner,
            self.lost or "chosen",
        )


@dataclass(frozen=True)
class DeviceLayout:
    """A division of devices into replicas, pipeline ranks and tensor-parallel ranks, and its predicted step."""

    replicas: int
    ranks: int
    """pipeline ranks of a replica"""
    tensor_parallel: int
    """ranks that share the tensors of a pipeline rank"""
    samples: int
    """samples of a microbatch"""
    microbatches: int
    """microbatches of a replica; 0 if the batch cannot be divided"""
    stages_per_rank: int = 1
    schedule: str = ""
    recomputed: int = 0
    """number of recomputed stages"""
    makespan: float | None = None
    """seconds of a step; None if it was not simulated"""
    bubble: float = 0.0
    peak: int = 0
    """the most bytes that a rank holds"""
    mfu: float | None = None
    """model flops utilization: the flops of the model, without recomputation, as a share of the datasheet's flop/s of
    all devices; None if either is unknown"""
    lost: str = ""
    """why it was not chosen; empty for the chosen one"""

    def __post_init__(self) -> None:
        if min(self.replicas, self.ranks, self.tensor_parallel, self.stages_per_rank) < 1:
            raise PlanError("the sizes of a layout must be 1 or more", layout=self)
        if min(self.samples, self.microbatches, self.recomputed, self.peak) < 0:
            raise PlanError("the counts of a layout must be 0 or more", layout=self)
        for value in (self.makespan, self.bubble, self.mfu):
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise PlanError("the predictions of a layout must be finite, 0 or more", layout=self)

    @property
    def row(self) -> tuple[str, ...]:
        """A row of the table of layouts."""
        count = f"{self.microbatches} x {self.samples}" if self.microbatches else ""
        stages = f"{self.stages_per_rank * self.ranks} {self.schedule}" if self.schedule else ""
        step = ("", "", "", "", "")
        if self.makespan is not None:
            mfu = "" if self.mfu is None else percent_text(self.mfu)
            recomputed = str(self.recomputed)
            step = (recomputed, seconds_text(self.makespan), percent_text(self.bubble), bytes_text(self.peak), mfu)
        sizes = f"{self.replicas} x {self.ranks} x {self.tensor_parallel}"
        return (sizes, count, stages, *step, self.lost or "chosen")

    def __str__(self) -> str:
        words = [
            counted(self.replicas, "replica"),
            counted(self.ranks, "pipeline rank"),
            f"{self.tensor_parallel} tensor-parallel",
        ]
        mfu = "" if self.mfu is None else f", MFU {percent_text(self.mfu)}"
        devices = counted(self.replicas * self.ranks * self.tensor_parallel, "device")
        return f"{devices} as {' x '.join(words)}, {counted(self.samples, 'sample')} per microbatch{mfu}"


@dataclass(frozen=True)
class Search:
    """The candidates from best to worst, and the reasons for the best, a sentence each."""

    candidates: tuple[Candidate, ...] = ()
    reasons: tuple[str, ...] = ()
    asked: tuple[tuple[str, str], ...] = ()
    """the options that the search was given, by name"""
    layouts: tuple[DeviceLayout, ...] = ()
    """the divisions of devices from best to worst, if they were searched; the first is the chosen one"""

    def __post_init__(self) -> None:
        for place, candidate in enumerate(self.candidates):
            if bool(candidate.lost) != bool(place):
                raise PlanError("the first candidate alone must be the chosen one", place=place, lost=candidate.lost)

    def __str__(self) -> str:
        if not self.candidates:
            return ""
        return "\n".join(align_columns([_SEARCH_COLUMNS, *(candidate.row for candidate in self.candidates)]))


class SavedRecord:
    """A record that users save and load by themselves."""

    def save(self, path: str | Path) -> None:
        """Write the record as JSON.

        Args:
            path: the file to write
        """
        # json_format imports the files of all records.
        from penstock.ir.json_format import save_record

        save_record(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a record that `save` wrote.

        Args:
            path: the file to read

        Raises:
            FormatError: if it does not hold such a record
        """
        from penstock.ir.json_format import load_record

        return load_record(path, cls)


@dataclass(frozen=True)
class Plan(SavedRecord):
    """How one model is trained as a pipeline, and the predicted time and memory of a step.

    `graph` and `costs` are those of one microbatch; the costs include the slowness and the overhead of the
    rank of each stage.
    """

    graph: Graph
    """the model for one microbatch"""
    partition: Partition
    """the nodes of every stage"""
    schedule: Schedule
    """the order of passes on every rank, and the rank of every stage"""
    choices: Choices
    """names of partitioner and schedule, and which stages recompute"""
    costs: StageCosts
    """seconds and bytes of every stage"""
    cluster: Cluster
    """ranks, memory and links"""
    predicted: Prediction
    """time, bubble and peak memory of a step"""
    search: Search = Search()
    """the other candidates and why this one was chosen; empty if all choices were given"""
    split: tuple[tuple[str, SplitRule], ...] = ()
    """how arguments are split whose shape leaves that open, by name; found by running the model on the example"""
    program: Program | None = None
    """the order with its messages, if that was given: it is run as it is; `schedule` has its compute actions"""
    device: str = ""
    """the device that the seconds are for: measured there, or estimated for it"""
    training: TrainingState = TrainingState()  # noqa: RUF009
    """optimizer and precision, whose bytes count in the peaks"""

    def __post_init__(self) -> None:
        self.partition.check(self.graph)
        if self.program is not None and self.program.schedule != self.schedule:
            raise PlanError("the program of a plan must have the compute actions of its schedule")
        stages = {
            "partition": self.partition.num_stages,
            "schedule": self.schedule.num_stages,
            "costs": self.costs.num_stages,
            "recompute": len(self.choices.recompute),
        }
        if len(set(stages.values())) > 1:
            raise PlanError("the parts of a plan must have the same number of stages", hint="", **stages)
        ranks = {
            "schedule": self.schedule.num_ranks,
            "cluster": self.cluster.ranks,
            "predicted": len(self.predicted.peaks),
        }
        if len(set(ranks.values())) > 1:
            raise PlanError("the parts of a plan must have the same number of ranks", hint="", **ranks)

    @cached_property
    def cuts(self) -> Cuts:
        """The edges between stages."""
        return self.partition.cuts(self.graph)

    @property
    def orders(self) -> Schedule | Program:
        """What is lowered and run: the given program, or else the schedule."""
        return self.schedule if self.program is None else self.program

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.schedule.num_ranks

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return self.partition.num_stages

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches in a batch."""
        return self.schedule.num_microbatches

    @property
    def lower_bound(self) -> float:
        """Seconds that no order of this partition and placement can undercut, proven."""
        return self.predicted.lower_bound

    def costs_on(self, cluster: Cluster) -> StageCosts:
        """The costs of the stages on ranks with another slowness or overhead."""
        if cluster.has_same_ranks_as(self.cluster):
            return self.costs
        placement = self.schedule.placement
        costs = self.cluster.costs_without_overhead(self.costs, placement, self.cuts)
        if self.cluster.slowness:
            costs = costs.times([1 / factor for factor in self.cluster.slowness_of(placement)])
        return cluster.costs_on_ranks(costs, placement, self.cuts)

    def __repr__(self) -> str:
        # Short, for consoles and notebooks: the fields hold the whole graph. str() and describe() give tables.
        return printable(f"Plan({next(iter(self._headline()))}, step {seconds_text(self.predicted.makespan)})")

    def __str__(self) -> str:
        rows = [self._row(stage) for stage in range(self.num_stages)]
        return printable("\n".join((*self._headline(), "", *align_columns([_PLAN_COLUMNS, *rows]))))

    def _repr_html_(self) -> str:
        rows = [self._row(stage) for stage in range(self.num_stages)]
        return "".join(map(paragraph, self._headline())) + html_table(_PLAN_COLUMNS, rows)

    def describe(self) -> str:
        """The plan, the reasons for it, and the other candidates, as text and tables."""
        parts = [str(self), "\n".join(self.search.reasons), str(self.search)]
        if found := self.search.layouts:
            # The best of every division: others differ in microbatches and stages only.
            best: dict[tuple[int, int, int], DeviceLayout] = {}
            for layout in found:
                best.setdefault((layout.replicas, layout.ranks, layout.tensor_parallel), layout)
            rows = [layout.row for layout in list(best.values())[:_SHOWN_LAYOUTS]]
            hidden = len(found) - len(rows)
            more = [f"and {hidden} more, also with other microbatches and stages; the JSON of the plan has them"]
            parts.insert(1, "\n".join([*align_columns([_LAYOUT_COLUMNS, *rows]), *(more if hidden else [])]))
        return printable("\n\n".join(part for part in parts if part))

    def _headline(self) -> Iterable[str]:
        predicted, recomputed = self.predicted, sum(self.choices.recompute)
        words = (
            f"{counted(self.num_stages, 'stage')} ({self.choices.partitioner}) on {counted(self.num_ranks, 'rank')}",
            f"schedule {self.choices.schedule}"
            + (" with its messages" if self.program is not None else "")
            + (", forward only" if self.schedule.is_forward_only else ""),
            counted(self.num_microbatches, "microbatch"),
            f"{counted(recomputed, 'stage') if recomputed else 'no stage'} recomputed",
        )
        yield ", ".join(words)
        if self.search.layouts:
            yield str(self.search.layouts[0])
        step, least = seconds_text(predicted.makespan), seconds_text(predicted.lower_bound)
        yield f"step {step}, bubble {percent_text(predicted.bubble)}, at best {least}"
        yield f"peak per rank: {_peaks_text(predicted.peaks)}{self._state_text()}"
        if self.device.startswith(ESTIMATED):
            yield f"seconds {self.device}"
        if self.split:
            yield "split: " + ", ".join(f"{name} {rule}" for name, rule in self.split)
        if self.cluster.slowness:
            yield "slowness per rank: " + ", ".join(f"{factor:g}" for factor in self.cluster.slowness)

    def _state_text(self) -> str:
        """What the peaks hold besides parameters, gradients and activations."""
        if self.schedule.is_forward_only:
            return ""
        name, precision, shards = self.training.optimizer, self.training.precision, self.training.optimizer_shards
        if name == "none":
            return ", without the state of an optimizer"
        sharded = f" sharded over {counted(shards, 'replica')}" if shards > 1 else ""
        return f", with the state of {name}" + (f" in {precision}" if precision else "") + sharded

    def _row(self, stage: int) -> tuple[str, ...]:
        nodes, costs = self.partition.stages[stage], self.costs
        return (
            str(stage),
            str(self.schedule.placement[stage]),
            str(len(nodes)),
            *(seconds_text(costs.mean_seconds(kind)[stage]) for kind in (Kind.FORWARD, Kind.BACKWARD)),
            bytes_text(costs.kept_bytes[stage]),
            bytes_text(costs.state[stage].parameters),
            nodes[0],
        )


def _peaks_text(peaks: tuple[int, ...]) -> str:
    """Every peak, or of many ranks the smallest and the largest."""
    if len(peaks) <= _SHOWN_PEAKS:
        return ", ".join(map(bytes_text, peaks))
    least, most = (choose(range(len(peaks)), key=peaks.__getitem__) for choose in (min, max))
    return f"{bytes_text(peaks[least])} (rank {least}) to {bytes_text(peaks[most])} (rank {most})"
