"""The doors to the planning half: schedule, lower, verify, simulate, without torch, processes or a device."""

from collections.abc import Sequence

from penstock import schedules
from penstock.errors import ScheduleError
from penstock.ir import (
    MAX_STAGES,
    Cluster,
    Cuts,
    Placement,
    Plan,
    Program,
    Schedule,
    StageCosts,
    Trace,
    as_int,
    parse_bytes,
)
from penstock.passes import DEFAULT_PASSES, Pass
from penstock.passes import lower as lower_schedule
from penstock.passes import verify as verify_orders
from penstock.planner import AUTO, ScheduleProblem, synthesise
from penstock.simulate import simulate as simulate_program


def schedule(
    name: str,
    ranks: int,
    microbatches: int,
    *,
    stages_per_rank: int | None = None,
    costs: StageCosts | None = None,
    memory: int | str | None = None,
) -> Schedule:
    """A schedule of the table, such as "1f1b" or "zbv", or with "auto" an order made for the costs and the memory.

    With costs, zero-bubble and V schedules put their weight gradients where they fill gaps. With memory, a limit in
    bytes per rank ("24GiB" also), a schedule that would hold more is refused; that needs the bytes of the costs.
    """
    if costs is not None and not isinstance(costs, StageCosts):
        raise ScheduleError("costs are StageCosts", given=repr(costs), hint="StageCosts.uniform(num_stages)")
    if str(name).lower() == AUTO:
        return _made(ranks, microbatches, stages_per_rank, costs, memory)
    built = schedules.build(name, ranks, microbatches, stages_per_rank, costs)
    if memory is not None:
        _check_memory(built, costs, parse_bytes(memory))
    return built


def _made(
    ranks: int, microbatches: int, stages_per_rank: int | None, costs: StageCosts | None, memory: int | str | None
) -> Schedule:
    """The best order for the stages in a loop or, with two per rank, in a vee."""
    depth = stages_per_rank
    if depth is None:
        depth = costs.num_stages // max(as_int(ranks) or 1, 1) if costs else 1
    stages = (as_int(ranks) or 0) * (as_int(depth) or 0)
    if not 1 <= stages <= MAX_STAGES or ranks < 1 or (costs is not None and costs.num_stages != stages):
        raise ScheduleError(
            "ranks and stages per rank must be 1 or more and make the stages of the costs",
            ranks=repr(ranks),
            stages_per_rank=repr(depth),
            stages_of_costs=costs.num_stages if costs else None,
            hint="costs with ranks * stages_per_rank stages",
        )
    costs = costs or StageCosts.uniform(ranks * depth)
    if memory is not None:
        _check_bytes(costs, parse_bytes(memory))
    placements = [Placement.loop(ranks, depth)] + [Placement.vee(ranks)] * (depth == 2 and ranks > 1)
    cluster = Cluster(ranks, memory)
    found = [synthesise(ScheduleProblem.of(costs, placement, microbatches, cluster)) for placement in placements]
    return min(found, key=lambda one: one.seconds).best.schedule


def _check_memory(built: Schedule, costs: StageCosts | None, limit: int) -> None:
    if costs is None:
        raise ScheduleError(
            "a memory limit needs costs to compare with", hint="costs=StageCosts(..., activation_bytes=...)"
        )
    _check_bytes(costs, limit)
    trace = simulate_program(lower_schedule(built), costs)
    peaks = [trace.peak_bytes(rank) for rank in range(trace.num_ranks)]
    if max(peaks) > limit:
        raise ScheduleError(
            "the schedule does not fit in memory",
            rank=peaks.index(max(peaks)),
            peak_bytes=max(peaks),
            limit=limit,
            hint="v_half or v_min, which hold fewer activations, or more microbatches of smaller size",
        )


def _check_bytes(costs: StageCosts, limit: int) -> None:
    if not any(costs.activation_bytes) and not any(state.total for state in costs.state):
        raise ScheduleError("a memory limit needs bytes", limit=limit, hint="costs with activation_bytes and state")


def lower(schedule: Schedule, *, cuts: Cuts | None = None, passes: Sequence[str | Pass] = DEFAULT_PASSES) -> Program:
    """Spell out messages, reductions and frees. Without cuts every stage reads the one before it."""
    return lower_schedule(schedule, cuts=cuts, passes=passes)


def verify(schedule_or_program: Schedule | Program, *, in_flight: int | None = None) -> None:
    """Raise a ScheduleError that names the actions, unless the orders are complete, lawful and free of deadlock."""
    verify_orders(schedule_or_program, in_flight=in_flight)


def simulate(
    program: Plan | Program | Schedule, costs: StageCosts | None = None, cluster: Cluster | None = None
) -> Trace:
    """Predict when everything happens; a Schedule is lowered first, a Plan brings its costs and cluster.

    Costs that are given are those of ranks that are alike: passes on a rank that the cluster calls slow take longer.
    """
    if isinstance(program, Plan):
        lowered, cluster = lower_schedule(program.schedule, cuts=program.cuts), cluster or program.cluster
        if costs is None:
            return simulate_program(lowered, program.costs_on(cluster), cluster)
        program = lowered
    elif isinstance(program, Schedule):
        program = lower_schedule(program)
    elif not isinstance(program, Program):
        raise ScheduleError("simulate takes a Plan, a Program or a Schedule", given=type(program).__name__)
    if cluster is not None and cluster.slowness:
        costs = (costs or StageCosts.uniform(program.num_stages)).times(cluster.slowness_of(program.placement))
    return simulate_program(program, costs, cluster)
