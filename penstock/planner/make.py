"""make: the Plan that a Request asks for."""

from dataclasses import replace

from penstock.errors import PartitionError, PlanError, ScheduleError
from penstock.ir.costs import StageCosts
from penstock.ir.fold import fold
from penstock.ir.graph import Graph
from penstock.ir.partition import Partition
from penstock.ir.placement import Placement
from penstock.ir.plan import Plan
from penstock.ir.prediction import Prediction
from penstock.ir.profile import Profile
from penstock.ir.schedule import Schedule
from penstock.ir.search import Choices
from penstock.partitioners import PARTITIONERS, Problem, by_modules, divide
from penstock.passes import lower
from penstock.planner.request import AUTO, Request
from penstock.schedules import SCHEDULES, build, find
from penstock.simulate import simulate

_DEFAULT_PARTITIONER = "uniform"


def make(graph: Graph, profile: Profile, request: Request) -> Plan:
    """The plan with the choices of the request; where it leaves them open, the one of the shortest step that fits."""
    if request.recompute == AUTO:
        return _as_memory_demands(graph, profile, request)
    if request.schedule != AUTO:
        plan = _plan(graph, profile, request, request.schedule)
        _check_memory(plan, request)
        return plan
    tried = (_tried(graph, profile, request, name) for name in SCHEDULES)
    fitting = [found for found in tried if found is not None]
    if not fitting:
        raise PlanError("no schedule of the table fits", ranks=request.cluster.ranks, memory=request.memory)
    return min(fitting, key=lambda plan: plan.predicted.makespan)


def _as_memory_demands(graph: Graph, profile: Profile, request: Request) -> Plan:
    """Nothing is computed again unless the plan does not fit otherwise."""
    try:
        return make(graph, profile, replace(request, recompute="none"))
    except PlanError:
        return make(graph, profile, replace(request, recompute="full"))


def with_microbatches(plan: Plan, count: int) -> Plan:
    """The same plan for another number of microbatches of the same size.

    A schedule that the user gave cannot be made anew: of it only fewer microbatches can be taken.
    """
    request = Request(plan.cluster, count, plan.choices.schedule, plan.partition)
    if plan.choices.schedule not in SCHEDULES:
        if count > plan.num_microbatches:
            raise PlanError("a given schedule has no more microbatches", schedule=plan.num_microbatches, asked=count)
        built = plan.schedule.first(request.microbatches)
    else:
        built = build(plan.choices.schedule, plan.num_ranks, count, plan.num_stages // plan.num_ranks, plan.costs)
    trace = simulate(lower(built, cuts=plan.cuts), plan.costs, plan.cluster)
    predicted = Prediction.of(trace, min(_bound(built, plan.costs), trace.makespan))
    return replace(plan, schedule=built, predicted=predicted)


def _tried(graph: Graph, profile: Profile, request: Request, name: str) -> Plan | None:
    try:
        plan = _plan(graph, profile, request, name)
        _check_memory(plan, request)
    except (PlanError, PartitionError, ScheduleError):
        return None
    return plan


def _plan(graph: Graph, profile: Profile, request: Request, schedule: str | Schedule) -> Plan:
    ranks = request.cluster.ranks
    if isinstance(schedule, Schedule):
        built, name = _given(schedule, request), "given"
    else:
        built, name = build(schedule, ranks, request.microbatches, _depth(request, schedule)), find(schedule).name
    partition, chosen = _partition(graph, profile, request, built.placement)
    costs = _recomputed(fold(graph, profile, partition), request.recompute == "full")
    if not isinstance(schedule, Schedule):
        # Now that the costs of the stages are known, weight gradients go where they fill gaps.
        built = build(schedule, ranks, request.microbatches, _depth(request, schedule), costs)
    trace = simulate(lower(built, cuts=partition.cuts(graph)), costs, request.cluster)
    choices = Choices(chosen, name, (request.recompute == "full",) * partition.num_stages)
    predicted = Prediction.of(trace, min(_bound(built, costs), trace.makespan))
    return Plan(graph, partition, built, choices, costs, request.cluster, predicted)


def _given(schedule: Schedule, request: Request) -> Schedule:
    found = {"ranks": schedule.num_ranks, "microbatches": schedule.num_microbatches}
    asked = {"ranks": request.cluster.ranks, "microbatches": request.microbatches}
    if found != asked:
        raise PlanError("the schedule is for other numbers than asked for", schedule=found, asked=asked)
    return schedule


def _depth(request: Request, schedule: str) -> int | None:
    """Stages per rank: those asked for, or as many as the explicit lists give."""
    given = request.partitioner
    if request.stages_per_rank is not None or isinstance(given, str):
        return request.stages_per_rank
    stages = given.num_stages if isinstance(given, Partition) else len(given)
    if stages % request.cluster.ranks:
        raise PlanError("the stages do not divide among the ranks", stages=stages, ranks=request.cluster.ranks)
    return stages // request.cluster.ranks


def _partition(graph: Graph, profile: Profile, request: Request, placement: Placement) -> tuple[Partition, str]:
    given, num_stages = request.partitioner, placement.num_stages
    if isinstance(given, Partition):
        found, name = given, "given"
    elif isinstance(given, str):
        name = _DEFAULT_PARTITIONER if given == AUTO else given
        if name not in PARTITIONERS:
            raise PlanError("unknown partitioner", name=repr(given), hint=f"one of {', '.join(PARTITIONERS)}")
        found = divide(name, Problem(graph, profile, replace(request.cluster, memory=None), placement)).partition
    else:
        found, name = by_modules(graph, given), "given"
    if found.num_stages != num_stages:
        raise PlanError("the partition has another number of stages", partition=found.num_stages, schedule=num_stages)
    found.check(graph)
    return found, name


def _recomputed(costs: StageCosts, recomputes: bool) -> StageCosts:
    """With recomputation a backward begins with a forward, and only what came in is kept until then."""
    if not recomputes:
        return costs
    received = [0] * costs.num_stages
    for message in costs.messages:
        received[message.consumer] += message.forward_bytes
    return replace(
        costs,
        input_grad=tuple(f + i for f, i in zip(costs.forward, costs.input_grad, strict=True)),
        backward=tuple(f + b for f, b in zip(costs.forward, costs.backward, strict=True)),
        activation_bytes=tuple(received),
        weight_grad_bytes=tuple(min(w, r) for w, r in zip(costs.weight_grad_bytes, received, strict=True)),
    )


def _bound(schedule: Schedule, costs: StageCosts) -> float:
    """No order is shorter than the work of the busiest rank, nor than one microbatch's way there and back."""
    each = [f + i + w for f, i, w in zip(costs.forward, costs.input_grad, costs.weight_grad, strict=True)]
    whole = [f + b for f, b in zip(costs.forward, costs.backward, strict=True)]
    least = [min(pair) for pair in zip(each, whole, strict=True)]
    work = [sum(least[s] for s in stages) * schedule.num_microbatches for stages in schedule.placement.stages]
    return max(work)


def _check_memory(plan: Plan, request: Request) -> None:
    for rank, (peak, limit) in enumerate(zip(plan.predicted.peaks, request.memory, strict=False)):
        if peak > limit:
            raise PlanError(
                "the plan does not fit in memory",
                rank=rank,
                peak_bytes=peak,
                limit=limit,
                hint="more ranks, more microbatches, recompute='full', or a schedule that holds less (1f1b, v_min)",
            )
