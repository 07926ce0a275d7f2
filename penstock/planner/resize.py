"""Plans and profiles for other numbers and sizes of microbatches."""

from dataclasses import fields, replace
from typing import Any

from penstock.errors import PlanError
from penstock.ir import Choices, Cluster, Graph, NodeCost, Partition, Plan, Prediction, Profile, StageCosts
from penstock.passes import lower
from penstock.planner.synthesis import ScheduleProblem, lower_bound
from penstock.schedules import SCHEDULES, build
from penstock.simulate import simulate


def with_microbatches(plan: Plan, count: int) -> Plan:
    """Returns the plan for another number of microbatches of the same size; every rank gets the same result.

    A schedule of the table is rebuilt; any other, given or synthesised, is truncated or repeated.
    """
    if plan.choices.schedule in SCHEDULES:
        built = build(plan.choices.schedule, plan.num_ranks, count, plan.num_stages // plan.num_ranks, plan.costs)
    else:
        built = plan.schedule.repeated(count)
    trace = simulate(lower(built, cuts=plan.cuts), plan.costs, plan.cluster)
    bound = lower_bound(ScheduleProblem(plan.costs, built.placement, count, plan.cluster, plan.cuts)).seconds
    return replace(plan, schedule=built, predicted=Prediction.of(trace, min(bound, trace.makespan)))


def unsplit(plan: Plan) -> Plan:
    """Returns the plan that runs the same microbatches through one stage on one rank."""
    partition = Partition((tuple(node.name for node in plan.graph.nodes),))
    cluster, schedule = Cluster(1), build("gpipe", 1, plan.num_microbatches)
    # The one rank has slowness 1, whichever ranks of the plan are slow.
    equal = plan.costs_on(replace(plan.cluster, slowness=None))
    costs = StageCosts(
        forward=(sum(equal.forward),),
        input_grad=(sum(equal.input_grad),),
        weight_grad=(sum(equal.weight_grad),),
        activation_bytes=(sum(equal.activation_bytes),),
    )
    trace = simulate(lower(schedule), costs, cluster)
    choices = Choices("given", "gpipe", (False,), "loop")
    return Plan(plan.graph, partition, schedule, choices, costs, cluster, Prediction.of(trace, trace.makespan))


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
        elif hasattr(here, "__dataclass_fields__"):
            changed[field.name] = _interpolate(here, there, share)
    return replace(one, **changed)


def _between(here: float, there: float, share: float) -> float:
    return here + (there - here) * share
