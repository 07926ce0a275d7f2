"""Divides a number of devices into replicas and pipeline ranks, for a batch of fixed size.

Every division is planned with 1F1B and the fast partitioner first, the best of them with the whole effort. Replicas
average their gradients as the runtime does: stage by stage, from the last backward of a stage on.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.errors import FitError, PenstockError, PlanError
from penstock.ir import Cluster, Plan, Replicas, align_columns, bytes_text, percent_text, seconds_text
from penstock.planner.candidates import Measured
from penstock.planner.options import AUTO, PlanOptions
from penstock.planner.plan_search import search

_FIRST_SCHEDULE = "1f1b"
"""the schedule of the first plan of a division, if it is left open"""
_REFINED = 3
"""divisions that are planned with the whole effort"""
_MOST_RANKS = 256
"""the most pipeline ranks of a replica that are tried"""


@dataclass(frozen=True)
class DeviceLayout:
    """One division of the devices, and its plan, or the reason why it has none."""

    replicas: int
    ranks: int
    samples: int
    """samples of a microbatch"""
    microbatches: int
    """microbatches of a replica"""
    plan: Plan | None = None
    problem: str = ""

    @property
    def row(self) -> tuple[str, ...]:
        """A row of the table of layouts."""
        sizes = (f"{self.replicas} x {self.ranks}", f"{self.microbatches} x {self.samples}")
        if self.plan is None:
            return (*sizes, "", "", "", "", self.problem)
        seen = self.plan.predicted
        step = (seconds_text(seen.makespan), percent_text(seen.bubble), bytes_text(max(seen.peaks)))
        return (*sizes, *step, self.plan.choices.schedule, "")


def device_layouts(
    measured: Mapping[int, Measured],
    options: PlanOptions,
    devices: int,
    samples: int,
    clusters: Mapping[int, Cluster],
    between: Replicas,
) -> tuple[DeviceLayout, ...]:
    """Plans every division of the devices; returns them from best to worst.

    `measured` is by the samples of a microbatch, `clusters` by the pipeline ranks of a replica, and `between` has the
    link between replicas. Raises FitError if no division fits, and PlanError if none suits the batch.
    """
    is_open = options.schedule == AUTO and options.stages_per_rank is None
    found = []
    for ranks in (each for each in range(1, min(devices, _MOST_RANKS) + 1) if devices % each == 0 and each in clusters):
        replicas = devices // ranks
        for size, model in measured.items():
            count, rest = divmod(samples, replicas * size)
            if rest or not count:
                continue
            cluster = replace(clusters[ranks], replicas=replace(between, count=replicas))
            first = _FIRST_SCHEDULE if is_open else options.schedule
            asked = replace(options, ranks=cluster, microbatches=count, schedule=first, budget_seconds=0.0)
            layout = DeviceLayout(replicas, ranks, size, count)
            # Without this, recomputation would be tried stage by stage in vain.
            if cluster.limits and _state_bytes(model, options) > sum(cluster.limits):
                found.append(replace(layout, problem="parameters, gradients and optimizer do not fit"))
            else:
                found.append(_planned(layout, model, asked))
    if not found:
        hint = "a batch that is a multiple of the replicas"
        raise PlanError("no division of the devices suits the batch", devices=devices, samples=samples, hint=hint)
    found.sort(key=_sort_key)
    if found[0].plan is None:
        hint = 'more devices or memory, or recompute="auto"'
        raise FitError(f"no division of {devices} devices fits: {found[0].problem}", hint=hint)
    share = options.budget_seconds / _REFINED
    for place, each in enumerate(found[:_REFINED]):
        if each.plan is not None:
            asked = replace(options, ranks=each.plan.cluster, microbatches=each.microbatches, budget_seconds=share)
            found[place] = _planned(each, measured[each.samples], asked)
    return tuple(sorted(found, key=_sort_key))


def _state_bytes(model: Measured, options: PlanOptions) -> int:
    """Bytes of the parameters of the whole model, of their gradients and of the optimizer."""
    specs, training = [value.spec for value in model.graph.parameters], options.training
    return sum(spec.bytes + training.gradient_bytes(spec) + training.optimizer_bytes(spec) for spec in specs)


def _planned(layout: DeviceLayout, model: Measured, options: PlanOptions) -> DeviceLayout:
    """The layout with its plan, or with the problem if none was found."""
    try:
        return replace(layout, plan=search({layout.microbatches: model}, options), problem="")
    except PenstockError as error:
        return replace(layout, plan=None, problem=error.problem)


def _sort_key(layout: DeviceLayout) -> tuple[bool, float]:
    """Divisions with a plan first, the shortest step first."""
    return layout.plan is None, 0.0 if layout.plan is None else layout.plan.predicted.makespan


def best_device_plan(layouts: tuple[DeviceLayout, ...], shown: int = 8) -> Plan:
    """Returns the plan of the best division; its reasons end with the table of divisions."""
    best = layouts[0].plan
    assert best is not None
    head = ("replicas x ranks", "microbatches", "step", "bubble", "peak", "schedule", "why not")
    chosen = layouts[0]
    text = f"{chosen.replicas} replicas x {chosen.ranks} ranks are the best division of the devices:"
    rows = align_columns([head, *(each.row for each in layouts[:shown])])
    return replace(best, search=replace(best.search, reasons=(*best.search.reasons, text, *rows)))
