"""What-if questions about a recording: where its time goes, what slow stages and replicas cost, what would be faster.

All answers are simulated from the recorded seconds of passes, with the recorded order unless another is asked for. An
*ideal* step is one in which every pass of a kind takes the mean seconds of its kind.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from penstock.errors import PenstockError
from penstock.ir import (
    NODE_SECONDS,
    Cluster,
    Placement,
    Schedule,
    StageCosts,
    align_columns,
    counted,
    html_page,
    html_table,
    paragraph,
    percent_text,
    seconds_text,
)
from penstock.planner.synthesis import ScheduleProblem, lower_bound, synthesise
from penstock.planner.training_traces import RecordedStep, RecordedTraining
from penstock.schedules import SCHEDULES, build

_SLOW = 1.02
"""a stage or replica is slow if its passes take this many times the mean"""
_UNEXPLAINED = 0.02
"""the share of a step by which measurement and simulation may differ before the report mentions it"""
_CAUSES = ("warm-up", "wait", "imbalance", "drain")
"""causes of idle time, in the order of the fields of `Idle`"""
_MOST_TRACES = 64
"""the most pipelines that are simulated as traces, to divide their idle time by cause"""
_SHOWN = 8
"""the most slow stages, and slow replicas, that are printed"""


@dataclass(frozen=True)
class Straggler:
    """A stage or replica of the recording, and the step time that its slowness costs."""

    kind: str
    """ "stage" or "replica" """
    number: int
    slowness: float
    """seconds of its passes, relative to the mean over all stages or replicas"""
    slowdown: float
    """a step in which it alone has its own seconds, relative to an ideal step"""
    cost: float
    """seconds by which a step would be shorter if its passes took the mean seconds"""


@dataclass(frozen=True)
class Alternative:
    """A change, and the seconds that a step would take with it."""

    change: str
    seconds: float
    note: str = ""


@dataclass(frozen=True)
class WhatIf:
    """The answers for a recording; seconds are of a whole step, over all replicas."""

    source: str
    stages: int
    replicas: int
    microbatches: int
    steps: int
    measured: float
    """mean seconds of a step"""
    simulated: float
    """the same, from the seconds of its passes"""
    pipeline_error: float
    """mean relative difference of simulated and measured pipelines, given their passes"""
    outside: float
    """seconds of a step besides its passes"""
    ideal: float
    """seconds of a step in which every pass of a kind takes the mean seconds of its kind"""
    bound: float
    """seconds that no order of the same stages can undercut, with their mean costs"""
    bubble: tuple[tuple[str, float], ...]
    """share of all ranks' time by cause of being idle, in the simulated pipelines"""
    parts: tuple[Straggler, ...]
    """stages, then replicas; in each the slowest first"""
    alternatives: tuple[Alternative, ...]
    """the fastest first"""

    def to_dict(self) -> dict[str, Any]:
        """The answers as JSON values."""
        plain = {name: value for name, value in vars(self).items() if name not in ("parts", "alternatives", "bubble")}
        lists = {name: [vars(each) for each in getattr(self, name)] for name in ("parts", "alternatives")}
        return {**plain, "bubble": dict(self.bubble), "slowdown": self.simulated / self.ideal, **lists}

    def rows(self) -> list[tuple[str, ...]]:
        """The alternatives as a table."""
        head = ("change", "step", "gain", "note")
        rows = [
            (each.change, seconds_text(each.seconds), percent_text(1 - each.seconds / self.simulated), each.note)
            for each in self.alternatives
        ]
        return [head, *rows]

    def lines(self) -> Iterator[str]:
        """The findings before the table."""
        sizes = counted(self.stages, "stage"), counted(self.microbatches, "microbatch")
        yield f"{counted(self.steps, 'step')} of {self.replicas} x {sizes[0]}, {sizes[1]}"
        yield (
            f"step {seconds_text(self.measured)} measured, {seconds_text(self.simulated)} simulated from its passes "
            f"(pipelines within {self.pipeline_error:.2%}), {seconds_text(self.outside)} of it outside the passes"
        )
        if abs(self.measured - self.simulated) > _UNEXPLAINED * self.measured:
            difference = seconds_text(abs(self.measured - self.simulated))
            direction = "longer" if self.measured > self.simulated else "shorter"
            yield f"the measured step is {difference} {direction} than its passes explain; all below is simulated"
        idle = ", ".join(f"{cause} {percent_text(share)}" for cause, share in self.bubble)
        yield f"bubble {percent_text(sum(share for _, share in self.bubble))}: {idle}"
        yield f"ideal step {seconds_text(self.ideal)}: slowdown {self.simulated / self.ideal:.3f}"
        for kind in ("stage", "replica"):
            slow = [each for each in self.parts if each.kind == kind and each.slowness >= _SLOW]
            for each in slow[:_SHOWN]:
                cost = f"costs {seconds_text(each.cost)} a step" if each.cost > 0 else "costs nothing by itself"
                alone = f"slowdown {each.slowdown:.3f} alone"
                yield f"{kind} {each.number} takes {each.slowness:.2f} times the mean: {cost}, {alone}"
            if not slow and sum(each.kind == kind for each in self.parts) > 1:
                yield f"no {kind} is slower than the others by {_SLOW - 1:.0%}"
        yield f"no order of these stages can take less than {seconds_text(self.bound)}"

    def __str__(self) -> str:
        return "\n".join((*self.lines(), "", *align_columns(self.rows())))


def what_if(recording: RecordedTraining, budget_seconds: float = 1.0) -> WhatIf:
    """Answers all questions about a recording; `budget_seconds` is the effort of synthesising an order."""
    schedule, outside = recording.steps[0].schedule, recording.outside
    mean = recording.mean_costs()
    # The mean length of the recorded pipelines, and that of an ideal one.
    now = _mean_step(recording, lambda each: recording.simulated[each.step, each.replica])
    ideal = recording.seconds(schedule, recording.equal_costs)
    cluster = Cluster(schedule.num_ranks, latency=recording.latency)
    problem = ScheduleProblem.of(mean, schedule.placement, schedule.num_microbatches, cluster)
    found = [*_alternatives(recording, mean, now, problem, budget_seconds)]
    return WhatIf(
        source=recording.source,
        stages=recording.num_stages,
        replicas=len(recording.replicas),
        microbatches=recording.num_microbatches,
        steps=len(recording.by_step),
        measured=recording.measured,
        simulated=outside + now,
        pipeline_error=fmean(map(abs, recording.errors)),
        outside=outside,
        ideal=outside + ideal,
        bound=outside + lower_bound(problem).seconds,
        bubble=_bubble(recording),
        parts=(*_stage_parts(recording, ideal, now), *_replica_parts(recording, ideal, now)),
        alternatives=tuple(
            sorted((replace(each, seconds=each.seconds + outside) for each in found), key=lambda each: each.seconds)
        ),
    )


def what_if_document(recording: RecordedTraining, found: WhatIf) -> str:
    """The answers as one HTML page, with the timelines of the first pipeline: as recorded, and with equal stages."""
    first = recording.steps[0]
    pictures = {
        "simulated from its passes": recording.run(first.schedule, first.costs),
        "equal stages": recording.run(first.schedule, recording.equal_costs),
    }
    columns, *rows = found.rows()
    lines = map(paragraph, (f"{found.source}:", *found.lines()))
    timelines = (f"<h2>{name}</h2>{trace._repr_html_()}" for name, trace in pictures.items())
    return html_page("what if", "<h1>What if</h1>", *lines, html_table(columns, rows), *timelines)


def _mean_step(recording: RecordedTraining, seconds: Callable[[RecordedStep], float]) -> float:
    """Mean over steps of the longest pipeline of the step."""
    return fmean(max(map(seconds, pipelines)) for pipelines in recording.by_step.values())


def _bubble(recording: RecordedTraining) -> tuple[tuple[str, float], ...]:
    """The mean idle share of the ranks' time by cause, over pipelines at equal distances in the recording."""
    chosen = recording.steps[:: -(-len(recording.steps) // _MOST_TRACES)]
    shares = [recording.run(each.schedule, each.costs).idle_shares for each in chosen]
    return tuple(zip(_CAUSES, map(fmean, zip(*shares, strict=True)), strict=True))


def _with_stage(costs: StageCosts, stage: int, source: StageCosts) -> StageCosts:
    """The costs with the seconds of one stage taken from `source`."""
    changed: dict[str, Any] = {}
    for name in NODE_SECONDS:
        entries = list(getattr(costs, name))
        entries[stage] = getattr(source, name)[stage]
        changed[name] = tuple(entries)
    return replace(costs, **changed)


def _stage_parts(recording: RecordedTraining, ideal: float, now: float) -> list[Straggler]:
    """The stages, the slowest first; `ideal` and `now` are the lengths of an ideal and of the recorded pipelines."""
    equal, mean = recording.equal_costs, recording.mean_costs().work
    parts = []
    for stage in range(recording.num_stages):

        def alone(each: RecordedStep, stage: int = stage) -> float:
            return recording.seconds(each.schedule, _with_stage(equal, stage, each.costs))

        def fixed(each: RecordedStep, stage: int = stage) -> float:
            return recording.seconds(each.schedule, _with_stage(each.costs, stage, equal))

        slowdown = (recording.outside + _mean_step(recording, alone)) / (recording.outside + ideal)
        slowness = mean[stage] / fmean(mean)
        # Only a slow stage is worth the simulation.
        cost = max(0.0, now - _mean_step(recording, fixed)) if slowness >= _SLOW else 0.0
        parts.append(Straggler("stage", stage, slowness, slowdown, cost))
    return sorted(parts, key=lambda part: -part.slowness)


def _replica_parts(recording: RecordedTraining, ideal: float, now: float) -> list[Straggler]:
    """The replicas, the slowest first; none if there is only one."""
    if len(recording.replicas) == 1:
        return []
    works = {
        replica: sum(recording.mean_costs(each for each in recording.steps if each.replica == replica).work)
        for replica in recording.replicas
    }
    parts = []
    for replica in recording.replicas:
        own = [
            recording.simulated[step, replica] for step in recording.by_step if (step, replica) in recording.simulated
        ]
        alone = fmean(max(ideal, each) for each in own)
        rest = fmean(
            max(
                (recording.simulated[each.step, each.replica] for each in pipelines if each.replica != replica),
                default=ideal,
            )
            for pipelines in recording.by_step.values()
        )
        slowdown = (recording.outside + alone) / (recording.outside + ideal)
        cost = max(0.0, now - max(rest, ideal))
        parts.append(Straggler("replica", replica, works[replica] / fmean(works.values()), slowdown, cost))
    return sorted(parts, key=lambda part: -part.slowness)


def _alternatives(
    recording: RecordedTraining, mean: StageCosts, now: float, problem: ScheduleProblem, budget_seconds: float
) -> Iterator[Alternative]:
    """Every change, without the seconds outside of passes; other orders are simulated with the mean costs.

    `now` is the length of the recorded pipelines. Their passes vary, which lengthens a step: so the lengths of other
    orders are multiplied by the ratio of `now` to the length of the recorded order with mean costs.
    """
    schedule, count = recording.steps[0].schedule, recording.num_microbatches
    present = recording.seconds(schedule, mean)
    scale = now / present
    yield Alternative("equal microbatches", present, "every pass takes the mean seconds of its stage, in all replicas")
    equal = recording.seconds(schedule, recording.equal_costs)
    yield Alternative("equal stages", equal, "at most: another cut or ranks of equal speed, in all replicas")
    for name, made, costs in _other_schedules(schedule, mean):
        conditions = []
        if SCHEDULES[name].splits_backward and not recording.splits_backward:
            conditions.append("a backward splits in half")
        if made.num_stages != schedule.num_stages:
            conditions.append(f"a stage can be cut in {made.num_stages // schedule.num_stages}")
        note = f"if {' and '.join(conditions)}" if conditions else ""
        yield Alternative(f"schedule {name}", scale * recording.seconds(made, costs), note)
    best = synthesise(problem, budget_seconds=budget_seconds, may_prove=False)
    note = "synthesised for the mean costs" + ("" if recording.splits_backward else ", if a backward splits in half")
    yield Alternative("schedule auto", scale * min(best.seconds, present), note)
    twice = schedule.repeated(2 * count)
    if (known := _known_name(schedule)) is not None:
        twice = build(known, schedule.num_ranks, 2 * count)
    yield Alternative(
        f"{2 * count} microbatches",
        # Everything outside the passes happens once for both halves; the caller adds it whole.
        (scale * recording.seconds(twice, mean) - recording.outside) / 2,
        "of the same size; seconds per batch of the present size",
    )


def _known_name(schedule: Schedule) -> str | None:
    """The name of the schedule if it is 1f1b or gpipe; None for any other."""
    if schedule.placement != Placement.loop(schedule.num_ranks):
        return None
    for name in ("1f1b", "gpipe"):
        if build(name, schedule.num_ranks, schedule.num_microbatches) == schedule:
            return name
    return None


def _other_schedules(schedule: Schedule, mean: StageCosts) -> Iterator[tuple[str, Schedule, StageCosts]]:
    """Schedules of the table on the same ranks; a stage that is cut into n parts has 1/n of its work in each."""
    if schedule.placement != Placement.loop(schedule.num_ranks) or schedule.num_ranks == 1:
        return
    for name in SCHEDULES:
        try:
            made = build(name, schedule.num_ranks, schedule.num_microbatches)
        except PenstockError:
            continue  # not for these numbers
        held = [len(stages) for stages in made.placement.stages]
        parts: dict[str, Any] = {
            each: tuple(getattr(mean, each)[rank] / held[rank] for rank in made.placement.ranks)
            for each in NODE_SECONDS
        }
        # From every stage to the next, each like the first message of the recording.
        stages = range(made.num_stages - 1)
        messages = tuple(replace(mean.messages[0], producer=stage, consumer=stage + 1) for stage in stages)
        costs = StageCosts(**parts, messages=messages)
        if made != schedule:
            yield name, build(name, schedule.num_ranks, schedule.num_microbatches, None, costs), costs
