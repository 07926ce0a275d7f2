"""schedule and simulate: an order by its name, and the predicted trace of a step. Does not load torch."""

from penstock import schedules
from penstock.errors import ScheduleError
from penstock.ir import (
    MAX_STAGES,
    Cluster,
    Placement,
    Plan,
    Program,
    Schedule,
    StageCosts,
    Trace,
    as_int,
    parse_bytes,
)
from penstock.passes import lower
from penstock.planner import AUTO, ScheduleProblem, simulate_stream, synthesise
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
    """Build a schedule by name.

    Args:
        name: such as "1f1b" or "zbv", in any case and punctuation; "auto" synthesises an order for the costs and the
            memory
        ranks: number of ranks
        microbatches: number of microbatches
        stages_per_rank: None: what the schedule needs
        costs: zero-bubble and V schedules place weight gradients where they fill gaps; None: equal costs
        memory: a limit per rank in bytes, or as "24GiB"; needs the bytes in the costs

    Returns:
        The order of passes on every rank.

    Raises:
        ScheduleError: if the name or the sizes are invalid, or the schedule exceeds the memory
    """
    if costs is not None and not isinstance(costs, StageCosts):
        raise ScheduleError("costs must be StageCosts", got=repr(costs), hint="StageCosts.uniform(num_stages)")
    if str(name).lower() == AUTO:
        return _synthesise(ranks, microbatches, stages_per_rank, costs, memory)
    built = schedules.build(name, ranks, microbatches, stages_per_rank, costs)
    if memory is None:
        return built
    if costs is None:
        raise ScheduleError("a memory limit needs costs", hint="costs=StageCosts(..., activation_bytes=...)")
    limit = parse_bytes(memory)
    _check_bytes(costs, limit)
    trace = simulate_program(lower(built), costs)
    peaks = [trace.peak_bytes(rank) for rank in range(trace.num_ranks)]
    if max(peaks) > limit:
        raise ScheduleError(
            "the schedule does not fit in memory",
            rank=peaks.index(max(peaks)),
            peak_bytes=max(peaks),
            limit=limit,
            hint="v_half or v_min, which hold fewer activations, or more microbatches of smaller size",
        )
    return built


def _synthesise(
    ranks: int, microbatches: int, stages_per_rank: int | None, costs: StageCosts | None, memory: int | str | None
) -> Schedule:
    """The best order for stages placed in a loop or, with two per rank, in a V."""
    if stages_per_rank is None:
        stages_per_rank = costs.num_stages // max(as_int(ranks) or 1, 1) if costs else 1
    stages = (as_int(ranks) or 0) * (as_int(stages_per_rank) or 0)
    if not 1 <= stages <= MAX_STAGES or ranks < 1 or (costs is not None and costs.num_stages != stages):
        raise ScheduleError(
            "ranks * stages_per_rank must be the number of stages of the costs, and 1 or more",
            ranks=repr(ranks),
            stages_per_rank=repr(stages_per_rank),
            stages_of_costs=costs.num_stages if costs else None,
            hint="costs with ranks * stages_per_rank stages",
        )
    costs = costs or StageCosts.uniform(ranks * stages_per_rank)
    if memory is not None:
        _check_bytes(costs, parse_bytes(memory))
    placements = [Placement.loop(ranks, stages_per_rank)]
    if stages_per_rank == 2 and ranks > 1:
        placements.append(Placement.vee(ranks))
    cluster = Cluster(ranks, memory)
    results = [synthesise(ScheduleProblem.of(costs, placement, microbatches, cluster)) for placement in placements]
    return min(results, key=lambda result: result.seconds).best.schedule


def _check_bytes(costs: StageCosts, limit: int) -> None:
    if not any(costs.activation_bytes) and not any(state.total for state in costs.state):
        raise ScheduleError("a memory limit needs bytes", limit=limit, hint="costs with activation_bytes and state")


def simulate(
    program: Plan | Program | Schedule,
    costs: StageCosts | None = None,
    cluster: Cluster | None = None,
    *,
    staleness: str | None = None,
    batches: int = 8,
) -> Trace:
    """Predict the trace of a step.

    Args:
        program: a Plan, a Program, or a Schedule, which is lowered first
        costs: those of a rank of normal speed; the slowness and the overhead of the cluster are added. None: those
            of the plan, or equal ones
        cluster: ranks and links; None: that of the plan, or messages that take no time
        staleness: as in `Pipeline`, for a Plan: the trace is that of several batches without a flush between them, and
            memory includes the weights that are stashed
        batches: with `staleness`, the number of batches

    Returns:
        When each action and message starts and ends, and the memory of each rank.

    Raises:
        ScheduleError: if the order would deadlock, or the arguments do not fit together
    """
    if staleness is not None:
        if not isinstance(program, Plan):
            raise ScheduleError("staleness needs a Plan", got=type(program).__name__, hint="penstock.plan(...)")
        if costs is not None:
            on = cluster or program.cluster
            costs = on.costs_on_ranks(costs, program.schedule.placement, program.cuts)
        return simulate_stream(program, staleness, batches, costs, cluster)
    if isinstance(program, Plan):
        lowered, cluster = lower(program.orders, cuts=program.cuts), cluster or program.cluster
        if costs is None:
            return simulate_program(lowered, program.costs_on(cluster), cluster)
        program = lowered
    elif isinstance(program, Schedule):
        program = lower(program)
    elif not isinstance(program, Program):
        raise ScheduleError("program must be a Plan, a Program or a Schedule", got=type(program).__name__)
    if cluster is not None:
        costs = cluster.costs_on_ranks(costs or StageCosts.uniform(program.num_stages), program.placement, program.cuts)
    return simulate_program(program, costs, cluster)
