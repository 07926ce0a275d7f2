"""Plans and profiles for other numbers and sizes of microbatches."""

from dataclasses import fields, is_dataclass, replace
from typing import Any

from penstock.errors import PlanError
from penstock.ir import Graph, NodeCost, Plan, Prediction, Profile, Schedule
from penstock.passes import lower
from penstock.planner.candidates import excess_bytes
from penstock.planner.options import AUTO
from penstock.planner.synthesis import ScheduleProblem, lower_bound
from penstock.schedules import SCHEDULES, build, build_on
from penstock.simulate import simulate


def with_microbatches(plan: Plan, count: int) -> Plan:
    """Returns the plan for another number of microbatches of the same size.

    A schedule of the table is rebuilt; any other, given or synthesised, is truncated or repeated. For more microbatches
    than a synthesised one has, a schedule of the table takes its place if that is predicted to be faster and fits in
    memory: between two repetitions the pipeline drains. A given program is truncated.
    """
    built = resized_schedule(plan, count)
    resized = _resimulated(plan, built)
    bound = lower_bound(ScheduleProblem(plan.costs, built.placement, count, plan.cluster, plan.cuts)).seconds
    predicted = replace(resized.predicted, lower_bound=min(bound, resized.predicted.makespan))
    return replace(resized, predicted=predicted)


def resized_schedule(plan: Plan, count: int) -> Schedule:
    """Returns the schedule of a plan for another number of microbatches, see `with_microbatches`."""
    if plan.program is not None and count > plan.num_microbatches:
        raise PlanError(
            "a given program cannot have more microbatches than its orders",
            microbatches=count,
            program=plan.num_microbatches,
            hint="plan(schedule=...) with another program, or a CSV without messages, which is repeated",
        )
    if plan.choices.schedule in SCHEDULES:
        return build(plan.choices.schedule, plan.num_ranks, count, plan.num_stages // plan.num_ranks, plan.costs)
    repeated = plan.schedule.repeated(count)
    has_costs = plan.costs.num_microbatches in (None, count)
    if plan.choices.schedule != AUTO or count <= plan.num_microbatches or not has_costs:
        return repeated
    best = _resimulated(plan, repeated)
    for name in SCHEDULES:
        # Legal for any cuts: for the values of an edge, the chain of stages between its ends would have waited as well.
        built = build_on(repeated.placement, name, count, plan.costs)
        if built is not None:
            found = _resimulated(plan, built)
            if found.predicted.makespan < best.predicted.makespan and excess_bytes(found) <= 0:
                best = found
    return best.schedule


def _resimulated(plan: Plan, schedule: Schedule) -> Plan:
    """The plan with another order, or with the beginning of its program, simulated; without a bound."""
    program = None if plan.program is None else plan.program.first(schedule.num_microbatches)
    trace = simulate(lower(program or schedule, cuts=plan.cuts), plan.costs, plan.cluster)
    return replace(plan, schedule=schedule, predicted=Prediction.of(trace, 0.0), program=program)


def interpolate_profile(graph: Graph, share: float, small: Profile, large: Profile) -> Profile:
    """Returns the profile of a graph from those of smaller and larger microbatches, by linear interpolation.

    `share` is the position of the graph's microbatch size between the small one (0) and the large one (1). The cost of
    a node is assumed to be a constant part per call and a part per sample.
    """
    ours = [node.name for node in graph.nodes]
    for profile in (small, large):
        if [cost.node for cost in profile.costs] != ours:
            problem = "microbatches of all sizes must run the same nodes"
            raise PlanError(problem, nodes=len(ours), measured=len(profile.costs))
    costs: tuple[NodeCost, ...] = tuple(
        _interpolate(one, other, share) for one, other in zip(small.costs, large.costs, strict=True)
    )
    sizes = dict(large.held)
    held = tuple((name, round(_between(size, sizes.get(name, size), share))) for name, size in small.held)
    step = _between(small.step_seconds, large.step_seconds, share)
    return replace(small, costs=costs, step_seconds=step, fingerprint=graph.fingerprint, held=held)


def _interpolate(one: Any, other: Any, share: float) -> Any:
    """The record with every number interpolated; other fields are those of the small size."""
    changed: dict[str, Any] = {}
    for field in fields(one):
        here, there = getattr(one, field.name), getattr(other, field.name)
        if isinstance(here, int):
            changed[field.name] = max(0, round(_between(here, there, share)))
        elif isinstance(here, float):
            changed[field.name] = max(0.0, _between(here, there, share))
        elif is_dataclass(here):
            changed[field.name] = _interpolate(here, there, share)
    return replace(one, **changed)


def _between(here: float, there: float, share: float) -> float:
    return here + (there - here) * share
