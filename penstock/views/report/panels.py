"""The contents of a report, and its sections that are text: key metrics, the model as a bar, idle time, and tables.

`report.html` calls these functions. To add a section, write a function here and a `<section>` there. Data that a Plan
and a Run do not have is a field of Contents, which `contents_of` in `api/report.py` fills.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from penstock.errors import ViewError
from penstock.ir import (
    Kind,
    Plan,
    Run,
    Trace,
    bytes_text,
    count_text,
    counted,
    number_text,
    percent_text,
    seconds_text,
)
from penstock.views.base import short_name
from penstock.views.condense import CondensedGraph, NodeGroup
from penstock.views.palette import STAGE_COLORS

MAX_TEXT = 400


@dataclass(frozen=True)
class Advice:
    """One change of a plan, and the step time that is predicted with it."""

    change: str
    """the change, as a command or in words"""
    seconds: float
    """predicted for a step of the same batch"""
    gain: float
    """share of the predicted step time that is saved"""
    note: str = ""
    """the assumption behind the prediction, or the cost of the change"""


@dataclass(frozen=True)
class Contents:
    """Everything that a report shows."""

    plan: Plan
    predicted: Trace
    run: Run | None = None
    advice: tuple[Advice, ...] = ()
    digest: str = ""
    """of the plan, in hexadecimal digits"""
    versions: tuple[tuple[str, str], ...] = ()
    """of the software that made the report, by name"""
    stream: Trace | None = None
    """the predicted trace of several batches without a flush between them, if it was asked for"""
    staleness: tuple[tuple[str, ...], ...] = ()
    """a table about the stages without flushes: the names of its columns, then a row per stage"""

    def __post_init__(self) -> None:
        if self.predicted.num_ranks != self.plan.num_ranks:
            ranks, planned = self.predicted.num_ranks, self.plan.num_ranks
            raise ViewError("the trace must have the ranks of the plan", ranks=ranks, planned=planned)
        if self.run is not None and self.run.plan != self.plan:
            raise ViewError("the run followed another plan", hint="the plan of the run")

    @property
    def traces(self) -> dict[str, Trace]:
        """The timelines to show, by name."""
        recorded = self.run.trace if self.run else None
        stream = {"predicted without flushes": self.stream} if self.stream else {}
        return {"predicted": self.predicted} | ({"measured": recorded} if recorded else {}) | stream


def headline(plan: Plan) -> str:
    """The choices of a plan in one line."""
    words = (
        f"{counted(plan.num_stages, 'stage')} on {counted(plan.num_ranks, 'rank')}",
        counted(plan.num_microbatches, "microbatch"),
        f"schedule {_clipped(plan.choices.schedule)}",
        f"partitioner {_clipped(plan.choices.partitioner)}",
    )
    return " · ".join(words)


def _clipped(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…"


# ----------------------------------------------------------------------------------------------------- key metrics

CLOSE, FAR = 0.1, 0.3
"""relative errors of the predicted step time up to which it is good, and up to which it is fair"""
FULL, NEARLY_FULL = 1.0, 0.9


class Card(NamedTuple):
    """One metric with its name and a note."""

    name: str
    value: str
    note: str = ""
    tone: str = ""
    """good, fair, bad or empty"""
    share: float | None = None
    """drawn as a bar"""


def cards(contents: Contents) -> Iterator[Card]:
    """The key metrics that are known."""
    plan, run, predicted = contents.plan, contents.run, contents.plan.predicted
    alone = plan.num_microbatches * sum(plan.costs.work)
    is_pipeline = predicted.makespan and plan.num_ranks > 1
    faster = f"{number_text(alone / predicted.makespan, 3)} × as fast as one rank" if is_pipeline else ""
    yield Card("predicted step", seconds_text(predicted.makespan, 3), faster)

    if run and (whole := run.step_seconds) is not None:
        # A plan predicts the passes only; a step also runs the optimizer and reads the data.
        # A trace is that of one batch.
        seconds = run.trace.makespan if run.trace is not None else whole / run.batches_per_step
        median = f"median of {counted(max(1, len(run.steps) - 1), 'step')}"
        note, tone = median if run.trace is None else f"with the optimizer {seconds_text(whole, 3)}, {median}", ""
        if predicted.makespan:
            error = abs(seconds / predicted.makespan - 1)
            tone = "good" if error <= CLOSE else "fair" if error <= FAR else "bad"
            note = f"{number_text(seconds / predicted.makespan, 3)} × the prediction, {note}"
        yield Card("measured step", seconds_text(seconds, 3), note, tone)
        samples = run.steps[-1].samples
        if samples and whole:
            yield Card("throughput", f"{number_text(samples / whole, 3)} /s", f"samples, {samples} in a step")

    measured = contents.traces.get("measured")
    note = f"measured {percent_text(measured.bubble)}" if measured else "share of all ranks' time without compute"
    yield Card("bubble", percent_text(predicted.bubble), note)

    above = predicted.makespan / predicted.lower_bound - 1 if predicted.lower_bound else 0.0
    note = f"no order of these stages takes less than {seconds_text(predicted.lower_bound, 3)}"
    yield Card("above the lower bound", percent_text(above), note, "good" if above <= CLOSE else "")

    peaks, word = (run.peaks, "measured") if run and run.peaks else (predicted.peaks, "predicted")
    if limits := plan.cluster.limits:
        shares = [peak / limit for peak, limit in zip(peaks, limits, strict=True)]
        rank = shares.index(max(shares))
        tone = "bad" if shares[rank] > FULL else "fair" if shares[rank] > NEARLY_FULL else "good"
        note = f"of {bytes_text(limits[rank])}, {word}, rank {rank}"
        yield Card("peak memory", bytes_text(peaks[rank]), note, tone, min(shares[rank], 1.0))
    else:
        rank = peaks.index(max(peaks))
        yield Card("peak memory", bytes_text(peaks[rank]), f"{word}, rank {rank}; no limit was given")

    if run and (losses := run.losses):
        lost = len(run.steps) - len(losses)
        note = f"{counted(len(run.steps), 'step')}" + (f", {lost} without a finite loss" if lost else "")
        tone = "bad" if lost else "good" if losses[-1] < losses[0] else "fair"
        yield Card("loss", f"{number_text(losses[0], 3)} → {number_text(losses[-1], 3)}", note, tone)
    if run and run.largest_difference is not None:
        shown = f"{run.largest_difference:.1e}".replace("e-0", "e-") if run.largest_difference else "0"
        yield Card("largest difference", shown, "relative, to the unsplit model")


# -------------------------------------------------------------------------------------------------- the model as a bar

LEAST_WIDTH = 0.4
"""per cent of the bar for a stage that costs next to nothing, so that it is visible"""
MAX_PARTS = 400
GLUE_WIDTH = 0.12
"""width of functions between modules, in modules"""


class Segment(NamedTuple):
    """A part of a stage; `width` is its share of the stage in per cent."""

    title: str
    kind: str
    width: float


class Band(NamedTuple):
    """A stage; `width` is its share of the bar in per cent."""

    stage: int
    rank: int
    width: float
    tip: str
    segments: tuple[Segment, ...]

    @property
    def hue(self) -> int:
        """The index of its colour."""
        return self.stage % len(STAGE_COLORS)


def model_bar(plan: Plan) -> list[Band]:
    """A band per stage, as wide as its cost; its parts are equally wide, as a plan holds no costs of nodes."""
    collapse = 0 if len(plan.graph.nodes) <= MAX_PARTS else 2
    condensed = CondensedGraph.of((plan.graph, plan.partition), collapse)
    by_stage: list[list[NodeGroup]] = [[] for _ in range(plan.num_stages)]
    for part in condensed.parts:
        if not part.from_inputs:
            by_stage[part.stage].append(part)
    has_segments = sum(map(len, by_stage)) <= MAX_PARTS
    work = plan.costs.work
    widths = [max(LEAST_WIDTH, 100 * seconds / (sum(work) or 1.0)) for seconds in work]
    bands = []
    for stage, parts in enumerate(by_stage):
        shares = [GLUE_WIDTH if part.is_glue else float(part.times) for part in parts]
        segments = tuple(
            Segment(part.title, part.kind, 100 * share / sum(shares)) for part, share in zip(parts, shares, strict=True)
        )
        rank, nodes = plan.schedule.placement[stage], counted(len(plan.partition.stages[stage]), "node")
        tip = f"stage {stage} on rank {rank}: {nodes}, {seconds_text(work[stage], 3)} per microbatch"
        width = 100 * widths[stage] / sum(widths)
        bands.append(Band(stage, rank, width, tip, segments if has_segments else ()))
    return bands


# --------------------------------------------------------------------------------------------------------- idle time

CAUSES = (
    ("compute", "passes of its stages"),
    ("warm-up", "before the first values arrive"),
    ("wait", "between passes, for data of other ranks"),
    ("imbalance", "less work than the busiest rank"),
    ("drain", "after its last pass"),
)
MAX_RANKS = 64


class Slice(NamedTuple):
    """One cause and its share of the step in per cent."""

    cause: int
    share: float
    tip: str


class RankTime(NamedTuple):
    """The step of one rank by cause."""

    name: str
    slices: tuple[Slice, ...]
    bubble: str


def rank_times(trace: Trace) -> list[RankTime]:
    """A row per rank, up to MAX_RANKS, and one for the mean of all."""
    if not trace.makespan:
        return []
    seconds = [(work, *idle) for work, idle in zip(trace.work, trace.idle, strict=True)]
    mean = tuple(sum(column) / len(seconds) for column in zip(*seconds, strict=True))
    names = [f"rank {rank}" for rank in range(len(seconds))][:MAX_RANKS]
    rows = []
    for name, own in zip((*names, "all ranks"), (*seconds[:MAX_RANKS], mean), strict=True):
        slices = []
        for cause, part in enumerate(own):
            if part > 0:
                tip = f"{CAUSES[cause][0]}: {seconds_text(part, 3)}, {percent_text(part / trace.makespan)}"
                slices.append(Slice(cause, round(100 * part / trace.makespan, 2), tip))
        rows.append(RankTime(name, tuple(slices), percent_text(sum(own[1:]) / trace.makespan)))
    return rows


def largest_cause(trace: Trace) -> str:
    """A sentence about the largest part of the bubble."""
    if not trace.makespan:
        return ""
    shares = trace.idle_shares
    most = max(shares)
    if most < 5e-4:
        return "No rank is ever idle."
    name, words = CAUSES[shares.index(most) + 1]
    bubble = percent_text(trace.bubble)
    return f"Most of the bubble of {bubble} is {name}, {words}: {percent_text(most)} of all ranks' time."


# ------------------------------------------------------------------------------------------------------------ tables

MAX_ROWS = 128
MAX_REASONS = 12
STAGE_COLUMNS = ("stage", "rank", "nodes", "parameters", "forward", "backward", "activations", "sends", "first node")
CANDIDATE_COLUMNS = ("", "step", "bubble", "peak", "schedule", "stages", "microbatches", "partitioner", "why not")


class StageRow(NamedTuple):
    """A stage, its cells, and the index of its colour."""

    hue: int
    cells: tuple[str, ...]


def stage_rows(plan: Plan) -> list[StageRow]:
    """The first MAX_ROWS stages."""
    condensed, costs = CondensedGraph.of((plan.graph, plan.partition), 0), plan.costs
    sends: dict[int, list[str]] = {}
    for crossing in condensed.crossings:
        what = f"{counted(len(crossing.values), 'tensor')}, {bytes_text(crossing.forward_bytes)} → {crossing.consumer}"
        sends.setdefault(crossing.producer, []).append(what)
    rows, kept = [], costs.kept_bytes
    for stage, names in enumerate(plan.partition.stages[:MAX_ROWS]):
        size = condensed.parameter_size(plan.graph[name] for name in names)
        sent = sends.get(stage, ["nothing"])
        cells = (
            str(stage),
            str(plan.schedule.placement[stage]),
            str(len(names)),
            f"{count_text(size.num_parameters)}, {bytes_text(size.bytes)}",
            *(seconds_text(costs.mean_seconds(kind)[stage], 3) for kind in (Kind.FORWARD, Kind.BACKWARD)),
            bytes_text(kept[stage]) + (", recomputed" if plan.choices.recompute[stage] else ""),
            "; ".join(sent[:4]) + ("; …" if len(sent) > 4 else ""),
            short_name(names[0]),
        )
        rows.append(StageRow(stage % len(STAGE_COLORS), cells))
    return rows


def candidate_rows(plan: Plan) -> list[tuple[str, ...]]:
    """The plans that the search compared, the chosen one first."""
    rows: list[tuple[str, ...]] = []
    for place, candidate in enumerate(plan.search.candidates[:MAX_ROWS], start=1):
        predicted, chosen = candidate.predicted, candidate.choices
        recomputed = f", {sum(chosen.recompute)} recomputed" if any(chosen.recompute) else ""
        cells = (
            str(place),
            seconds_text(predicted.makespan, 3),
            percent_text(predicted.bubble),
            bytes_text(max(predicted.peaks)),
            _clipped(chosen.schedule),
            f"{len(chosen.recompute)} {chosen.placement}{recomputed}",
            str(candidate.num_microbatches),
            _clipped(chosen.partitioner),
            _clipped(candidate.lost) or "chosen",
        )
        rows.append(cells)
    return rows


def reasons(plan: Plan) -> list[str]:
    """Why the plan was chosen, a sentence each."""
    return [_clipped(reason) for reason in plan.search.reasons[:MAX_REASONS]]


def advice_rows(advice: tuple[Advice, ...]) -> list[tuple[str, str, str, str]]:
    """Per change its gain, the predicted step time, and the assumption behind it."""
    return [
        (_clipped(each.change), f"−{percent_text(each.gain)}", seconds_text(each.seconds, 3), _clipped(each.note))
        for each in advice
    ]
