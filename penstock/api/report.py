"""report: a plan or a run as an HTML page, with simulated advice on what would make a step shorter."""

import hashlib
import platform
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from html import escape
from importlib.metadata import version
from pathlib import Path

from penstock.api.simulation import simulate
from penstock.errors import PenstockError, ViewError
from penstock.ir import Cluster, Plan, Program, Run, Schedule, StageCosts, Trace, to_json, write_atomic
from penstock.passes import lower
from penstock.planner import ScheduleProblem, is_too_large, staleness_table, synthesise, with_microbatches
from penstock.schedules import SCHEDULES, build
from penstock.simulate import simulate as simulate_program
from penstock.views import Advice, Contents, Report

MIN_GAIN = 0.005
MAX_ADVICE = 6
MAX_PASSES = 20_000
"""larger plans get no advice"""
SEARCH_SECONDS = 0.5
NUM_BATCHES = 3
"""batches of the timeline without flushes"""
_PACKAGES = ("penstock", "torch", "numpy")


def advise(plan: Plan) -> tuple[Advice, ...]:
    """Changes that shorten a step by 0.5 % or more within the memory limits, the largest gain first."""
    if not plan.predicted.makespan or len(plan.schedule.table.codes) > MAX_PASSES:
        return ()
    advice = [each for change in _CHANGES for each in change(plan) if each.gain >= MIN_GAIN]
    return tuple(sorted(advice, key=lambda each: -each.gain)[:MAX_ADVICE])


def _other_orders(plan: Plan) -> Iterator[Advice]:
    """The best other schedule of the table, and a synthesised order if it is better still."""
    seconds = plan.predicted.makespan
    traces = table_traces(plan)
    peaks = {name: [trace.peak_bytes(rank) for rank in range(trace.num_ranks)] for name, trace in traces.items()}
    if fitting := {name: trace.makespan for name, trace in traces.items() if _fits(plan.cluster, peaks[name])}:
        name = min(fitting, key=lambda each: fitting[each])
        seconds = min(seconds, fitting[name])
        yield _advice(plan, f"schedule {name}", fitting[name], "the same cuts in another order")
    synthesised = _synthesised_seconds(plan)
    if synthesised is not None and synthesised < (1 - MIN_GAIN) * seconds:
        yield _advice(plan, "schedule auto", synthesised, "an order searched for these cuts and costs")


def table_traces(plan: Plan) -> dict[str, Trace]:
    """Traces of the named schedules with the same stages on the same ranks, without that of the plan."""
    stages_per_rank, rest = divmod(plan.num_stages, plan.num_ranks)
    traces: dict[str, Trace] = {}
    for name in SCHEDULES if not rest else ():
        with suppress(PenstockError):
            built = build(name, plan.num_ranks, plan.num_microbatches, stages_per_rank, plan.costs)
            if built.placement == plan.schedule.placement and name != plan.choices.schedule:
                traces[name] = _simulate(plan, built)
    return traces


def _synthesised_seconds(plan: Plan) -> float | None:
    """Seconds of a synthesised order; None if the plan already has one or is near the lower bound."""
    if plan.choices.schedule == "auto" or plan.lower_bound > (1 - MIN_GAIN) * plan.predicted.makespan:
        return None
    problem = ScheduleProblem(plan.costs, plan.schedule.placement, plan.num_microbatches, plan.cluster, plan.cuts)
    if is_too_large(problem, SEARCH_SECONDS):
        return None
    with suppress(PenstockError):
        synthesis = synthesise(problem, budget_seconds=SEARCH_SECONDS, may_prove=False)
        return _simulate(plan, synthesis.best.schedule).makespan
    return None


def _smaller_microbatches(plan: Plan) -> Iterator[Advice]:
    """The same batch in twice as many microbatches."""
    count = 2 * plan.num_microbatches
    # Samples of a microbatch, from its first input; 1 if unknown.
    shapes = [value.spec.shape for value in plan.graph.inputs if value.spec.shape]
    if (shapes[0][0] if shapes else 1) % 2 == 0:
        with suppress(PenstockError):
            halved = with_microbatches(replace(plan, costs=plan.costs.scaled(0.5)), count)
            if _fits(halved.cluster, halved.predicted.peaks):
                note = "the same batch; holds if half a microbatch takes half the time"
                yield _advice(plan, f"{count} microbatches", halved.predicted.makespan, note)


def _larger_batch(plan: Plan) -> Iterator[Advice]:
    """Twice the batch, which halves the bubble per sample."""
    count = 2 * plan.num_microbatches
    with suppress(PenstockError):
        longer = with_microbatches(plan, count)
        if _fits(longer.cluster, longer.predicted.peaks):
            note = f"{count} microbatches of the same size; seconds are for as many samples as now"
            yield _advice(plan, "twice the batch", longer.predicted.makespan / 2, note)


def _balance(plan: Plan) -> Iterator[Advice]:
    """An upper bound for better cuts: every rank with the same work."""
    costs, placement = plan.costs, plan.schedule.placement
    work = [0.0] * plan.num_ranks
    for rank, seconds in zip(placement.ranks, costs.work, strict=True):
        work[rank] += seconds
    if not all(work):
        return
    mean = sum(work) / len(work)
    even = costs.times([mean / work[rank] for rank in placement.ranks])
    note = "at most: ranks with exactly equal work; a larger capture depth allows finer cuts"
    yield _advice(plan, "finer cuts", _simulate(plan, plan.orders, even).makespan, note)


def _links(plan: Plan) -> Iterator[Advice]:
    """The cost of messages: the same order over instantaneous links."""
    free = plan.cluster.with_instant_messages()
    if free != plan.cluster:
        note = "at most: messages that take no time at all"
        yield _advice(plan, "faster links", _simulate(plan, plan.orders, cluster=free).makespan, note)


def _cores(plan: Plan) -> Iterator[Advice]:
    """The cost of sharing the cores of one machine."""
    if plan.cluster.cores is not None and plan.cluster.cores < plan.num_ranks:
        alone = replace(plan.cluster, cores=None)
        note = f"now {plan.num_ranks} ranks share {plan.cluster.cores}"
        yield _advice(plan, "a core for every rank", _simulate(plan, plan.orders, cluster=alone).makespan, note)


_CHANGES = (_other_orders, _smaller_microbatches, _larger_batch, _balance, _links, _cores)


def _simulate(
    plan: Plan, schedule: Schedule | Program, costs: StageCosts | None = None, cluster: Cluster | None = None
) -> Trace:
    """The trace of another order, or with other costs or links."""
    return simulate_program(lower(schedule, cuts=plan.cuts), costs or plan.costs, cluster or plan.cluster)


def _advice(plan: Plan, change: str, seconds: float, note: str) -> Advice:
    return Advice(change, seconds, 1 - seconds / plan.predicted.makespan, note)


def _fits(cluster: Cluster, peaks: Sequence[int]) -> bool:
    """Whether no rank exceeds its memory."""
    return not cluster.limits or all(peak <= limit for peak, limit in zip(peaks, cluster.limits, strict=True))


class ReportPage(str):
    """The HTML text of a report, which a notebook shows as a page."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        # In a frame: the styles of the page must not change the notebook.
        return f'<iframe srcdoc="{escape(self)}" width="100%" height="700" style="border:0"></iframe>'


def report(plan_or_run: Plan | Run, path: str | Path | None = None, *, staleness: str | None = None) -> ReportPage:
    """Write the report of a plan or a run: one HTML document, at most 300 KB and needing no network.

    Simulates the plan for its timeline, and changes of it for the advice.

    Args:
        plan_or_run: a Plan, or the Run of a training
        path: the file to write; None: none
        staleness: as in `Pipeline`: also show a few batches without a flush between them

    Returns:
        The text of the document, which a notebook shows as a page.

    Raises:
        ViewError: if it is neither a plan nor a run
    """
    document = ReportPage(Report()(contents_of(plan_or_run, staleness)))
    if path is not None:
        write_atomic(path, document)
    return document


def contents_of(plan_or_run: Plan | Run, staleness: str | None = None) -> Contents:
    """Simulate a plan and compute everything that its report shows."""
    if not isinstance(plan_or_run, Plan | Run):
        hint = "penstock.report(plan), or the Run that a training loop returned"
        raise ViewError("a report needs a plan or a run", got=type(plan_or_run).__name__, hint=hint)
    run = plan_or_run if isinstance(plan_or_run, Run) else None
    plan = run.plan if run else plan_or_run
    versions = (("python", platform.python_version()), *((name, version(name)) for name in _PACKAGES))
    contents = Contents(plan, simulate(plan), run, advise(plan), digest_of(plan), versions)
    if staleness is None:
        return contents
    stream = simulate(plan, staleness=staleness, batches=NUM_BATCHES)
    return replace(contents, stream=stream, staleness=staleness_table(plan, staleness))


def digest_of(plan: Plan) -> str:
    """SHA-256 of the plan as it is saved: two plans with the same digest are the same."""
    return hashlib.sha256(to_json(plan).encode()).hexdigest()
