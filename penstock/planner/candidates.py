"""The candidates of the planner: layouts (cuts, placement and costs without an order) and the plans made from them."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from penstock.errors import PartitionError, PlanError
from penstock.ir import (
    Choices,
    Cluster,
    Cuts,
    Graph,
    Kind,
    Partition,
    Placement,
    Plan,
    Prediction,
    Profile,
    Program,
    Schedule,
    StageCosts,
    TrainingState,
    compute_stage_costs,
)
from penstock.partitioners import PARTITIONERS, Division, Partitioner, Problem, by_modules, divide
from penstock.partitioners import find as find_partitioner
from penstock.passes import lower, verify
from penstock.planner.options import AUTO, PlanOptions
from penstock.planner.synthesis import ScheduleProblem, lower_bound, synthesise
from penstock.schedules import SCHEDULES, build, build_on
from penstock.simulate import simulate

GIVEN = "given"
"""in place of a name, for a schedule or stages that the user gave"""
_STAGES_PER_RANK = (1, 2, 3, 4)
"""numbers of stages per rank that are considered if the options leave them open"""
LIGHT = 0.1
"""share of the mean seconds of a stage below which a node is not worth a stage"""
_TRAFFIC_FACTOR = 4.0
"""how many times slower links are assumed to be for cuts with fewer bytes"""


class Measured(NamedTuple):
    """The graph of one microbatch and the profile of that graph."""

    graph: Graph
    profile: Profile


Models = Mapping[int, Measured]
"""by the number of microbatches"""


@dataclass(frozen=True)
class StageLayout:
    """A plan without its order of passes."""

    measured: Measured
    partition: Partition
    placement: Placement
    num_microbatches: int
    cluster: Cluster
    choices: Choices
    training: TrainingState = TrainingState()
    is_certified: bool = True
    """whether plans get a lower bound, which takes longer to compute than the simulation"""

    @cached_property
    def plain_costs(self) -> StageCosts:
        """Costs of the stages if none recomputes."""
        return self._costs(())

    @cached_property
    def costs(self) -> StageCosts:
        """Costs of the stages, recomputed as chosen."""
        stages = [stage for stage, again in enumerate(self.choices.recompute) if again]
        return self._costs(stages) if stages else self.plain_costs

    @cached_property
    def recomputed_costs(self) -> StageCosts:
        """Costs of the stages if all recompute."""
        return self._costs(range(self.partition.num_stages))

    @cached_property
    def cuts(self) -> Cuts:
        """The edges between stages."""
        return self.partition.cuts(self.measured.graph)

    @cached_property
    def problem(self) -> ScheduleProblem:
        """The problem of finding an order."""
        return ScheduleProblem(self.costs, self.placement, self.num_microbatches, self.cluster, self.cuts)

    @cached_property
    def bound(self) -> float:
        """Seconds that no order can undercut; 0 if it is not certified."""
        return lower_bound(self.problem).seconds if self.is_certified else 0.0

    def recomputing(self, flags: tuple[bool, ...] | None = None) -> "StageLayout":
        """Returns the same with these stages recomputed; None: all of them."""
        flags = (True,) * self.partition.num_stages if flags is None else flags
        return replace(self, choices=replace(self.choices, recompute=flags))

    def _costs(self, recomputed: Collection[int]) -> StageCosts:
        graph, profile = self.measured
        costs = compute_stage_costs(graph, profile, self.partition, self.training, self.placement, recomputed)
        return self.cluster.costs_on_ranks(costs, self.placement, self.cuts)

    def plan(self, orders: Schedule | Program, name: str, bound: float = 0.0) -> Plan:
        """Returns the plan with this order, simulated; `bound` is a lower bound that is already known."""
        program = lower(orders, cuts=self.cuts)
        if isinstance(orders, Program):
            verify(program)
        trace = simulate(program, self.costs, self.cluster)
        # The bound holds for every order; only rounding can put it above the makespan of one.
        predicted = Prediction.of(trace, min(max(self.bound, bound), trace.makespan))
        choices = replace(self.choices, schedule=name)
        schedule, given = (orders.schedule, orders) if isinstance(orders, Program) else (orders, None)
        return Plan(
            self.measured.graph,
            self.partition,
            schedule,
            choices,
            self.costs,
            self.cluster,
            predicted,
            program=given,
            device=self.measured.profile.device,
            training=self.training,
        )


class LayoutPlan(NamedTuple):
    """A plan and the layout that it was made from."""

    plan: Plan
    layout: StageLayout


def layouts(models: Models, options: PlanOptions) -> Iterator[StageLayout]:
    """Yields for every number of microbatches and every placement the cuts for it; raises if there are none.

    If the partitioner is left open, these are the cuts of the fast one; `other_layouts` has those of the others.
    """
    is_auto = options.partitioner == AUTO
    if is_auto:
        options = replace(options, partitioner=_tried_partitioners()[0].name)
    refused: PartitionError | None = None
    has_layout = False
    for count, measured in models.items():
        # With the partitioner open too, `other_layouts` has the placements that partitioners choose.
        for placement in _placements(options, count, has_choice=not is_auto):
            try:
                for layout in _cut(measured, placement, count, options, joins_light=is_auto):
                    has_layout = True
                    yield layout
            except PartitionError as error:
                refused = refused or error
    if refused is not None and not has_layout:
        raise refused


def other_layouts(layout: StageLayout, options: PlanOptions) -> Iterator[StageLayout]:
    """Yields other cuts for the same placement and, if that is open too, for placements that partitioners choose."""
    if options.partitioner != AUTO:
        return
    measured, count = layout.measured, layout.num_microbatches
    members = [member for member in _tried_partitioners() if not member.is_fast]
    for_slow_links = [member for member in members if member.is_for_slow_links]
    others = [member for member in members if member not in for_slow_links and not member.chooses_placement]
    # Cuts with fewer bytes than a partitioner aims for. It accepts messages as long as the passes that hide them; but
    # nothing hides the first and last messages, and with few microbatches in flight hardly any are hidden.
    cluster = options.cluster.with_cpu_on_links()
    slower = cluster.with_bandwidth_times(1 / _TRAFFIC_FACTOR)
    problem = Problem(measured.graph, measured.profile, replace(slower, memory=None), layout.placement)
    for member in for_slow_links if slower != cluster else ():
        with suppress(PartitionError):
            found = _divide(member.name, problem, joins_light=True)
            if found.placement == layout.placement:
                yield _layout(measured, found.partition, layout.placement, count, options, member.name)
    for member in (*for_slow_links, *others):
        with suppress(PartitionError):
            changed = replace(options, partitioner=member.name)
            yield from _cut(measured, layout.placement, count, changed, joins_light=True)
    if options.schedule == AUTO and options.stages_per_rank is None:
        problem = Problem(measured.graph, measured.profile, replace(cluster, memory=None))
        for member in (member for member in members if member.chooses_placement):
            with suppress(PartitionError):
                found = _divide(member.name, problem, joins_light=True)
                yield _layout(measured, found.partition, found.placement, count, options, member.name)


def _tried_partitioners() -> list[type[Partitioner]]:
    """The partitioners of the table that the planner searches, a fast one first."""
    members = [member for member in PARTITIONERS.values() if member.is_tried and not member.is_optional]
    return sorted(members, key=lambda member: not member.is_fast)


def _placements(options: PlanOptions, count: int, has_choice: bool) -> list[Placement | None]:
    """The placements that the schedule allows; None for the one that the partitioner chooses, if `has_choice`."""
    ranks, asked, given = options.cluster.ranks, options.schedule, options.partitioner
    if isinstance(given, Division):
        return [_division_placement(given.placement, options, count)]
    per_rank = _stages_per_rank(options)
    if isinstance(asked, Schedule | Program):
        return [_schedule_placement(asked, ranks, count)]
    if asked != AUTO:
        return [build(str(asked), ranks, count, per_rank).placement]
    is_chosen = has_choice and per_rank is None and isinstance(given, str)
    if is_chosen and find_partitioner(str(given)).chooses_placement:
        return [None]
    numbers = _STAGES_PER_RANK if per_rank is None else (per_rank,)
    found: list[Placement | None] = [Placement.loop(ranks, number) for number in numbers]
    if 2 in numbers and ranks > 1:
        # On one rank a vee is a loop.
        found.append(Placement.vee(ranks))
    return [*found, None] if is_chosen else found


def _division_placement(placement: Placement, options: PlanOptions, count: int) -> Placement:
    """The placement of a given Division; raises if the other options contradict it."""
    ranks, asked = options.cluster.ranks, options.schedule
    per_rank, rest = divmod(placement.num_stages, ranks)
    wanted: Placement | None = placement
    if isinstance(asked, Schedule | Program):
        wanted = _schedule_placement(asked, ranks, count)
    elif asked != AUTO:
        wanted = None if rest else build(str(asked), ranks, count, per_rank).placement
    is_other_number = options.stages_per_rank is not None and options.stages_per_rank * ranks != placement.num_stages
    if placement.num_ranks != ranks or wanted != placement or is_other_number:
        raise PlanError(
            "ranks, stages_per_rank and schedule must be those of the given placement",
            placement=placement.ranks,
            schedule=asked if isinstance(asked, str) else GIVEN,
            hint=f'ranks={placement.num_ranks}, stages_per_rank=None, schedule="auto"',
        )
    return placement


def _schedule_placement(schedule: Schedule | Program, ranks: int, count: int) -> Placement:
    """The placement of a given schedule; raises if its sizes are not the requested ones."""
    found = {"ranks": schedule.num_ranks, "microbatches": schedule.num_microbatches}
    wanted = {"ranks": ranks, "microbatches": count}
    if found != wanted:
        hint = "ranks={ranks}, microbatches={microbatches}".format(**found)
        raise PlanError("the schedule must have the requested sizes", schedule=found, asked=wanted, hint=hint)
    return schedule.placement


def _stages_per_rank(options: PlanOptions) -> int | None:
    """The option, or else the number that follows from the given stages; None if neither is given."""
    given = options.partitioner
    if options.stages_per_rank is not None or isinstance(given, str | Division):
        return options.stages_per_rank
    stages, ranks = given.num_stages if isinstance(given, Partition) else len(given), options.cluster.ranks
    if stages % ranks:
        hint = "the same number of lists for every rank"
        raise PlanError("the number of stages must be a multiple of the ranks", stages=stages, ranks=ranks, hint=hint)
    return stages // ranks


def _divide(name: str, problem: Problem, joins_light: bool, is_mixed: bool = False) -> Division:
    """Divides a problem; with `joins_light`, no stage consists of light nodes only, unless only that is possible."""
    if joins_light and (groups := light_groups(problem)):
        with suppress(PartitionError):
            return divide(name, replace(problem, together=groups), is_mixed=is_mixed)
    return divide(name, problem, is_mixed=is_mixed)


def light_groups(problem: Problem) -> tuple[tuple[str, ...], ...]:
    """Returns groups that keep light nodes, such as a view or a norm, with a heavier neighbour.

    A node is light if it takes less than LIGHT times the mean seconds of a stage. A group is the chain from a light
    node to the first heavier node before or after it, if its light nodes are light in total and nothing branches off.
    The side on which more bytes would be sent if it were cut there is tried first.
    """
    graph, profile = problem.graph, problem.profile
    num_stages = problem.placement.num_stages if problem.placement else problem.cluster.ranks
    seconds = {cost.node: cost.seconds for cost in profile.costs}
    limit = LIGHT * sum(seconds.values()) / num_stages
    ahead: dict[str, Counter[str]] = defaultdict(Counter)
    behind: dict[str, Counter[str]] = defaultdict(Counter)
    for edge in graph.edges:
        if not graph[edge.producer].from_inputs:
            sent = graph.spec(edge.value).bytes
            ahead[edge.producer][edge.consumer] += sent
            behind[edge.consumer][edge.producer] += sent
    groups = []
    for node in graph.nodes:
        if node.from_inputs or seconds[node.name] >= limit:
            continue
        is_ahead = ahead[node.name].total() >= behind[node.name].total()
        for neighbours in (ahead, behind) if is_ahead else (behind, ahead):
            chain, total = [node.name], seconds[node.name]
            while total < limit and len(found := neighbours[chain[-1]]) == 1:
                (name,) = found
                chain.append(name)
                if seconds[name] >= limit:
                    break
                total += seconds[name]
            if seconds[chain[-1]] >= limit and total < limit:
                groups.append(tuple(chain))
                break
    return tuple(groups)


def _cut(
    measured: Measured, placement: Placement | None, count: int, options: PlanOptions, joins_light: bool = False
) -> Iterator[StageLayout]:
    """The given stages, or the cuts of the named partitioner: for time alone and, if limited, also within memory.

    Partitioners even out the work of ranks; with several stages per rank, a fast one also evens out that of stages, as
    ranks with equal sums of unequal stages wait for each other. Without a placement, the cuts are those for the
    placement that the partitioner chooses.
    """
    given = options.partitioner
    if not isinstance(given, str):
        assert placement is not None
        if isinstance(given, Division):
            partition = given.partition
        else:
            partition = given if isinstance(given, Partition) else by_modules(measured.graph, given)
        yield _layout(measured, partition, placement, count, options, GIVEN)
        return
    cluster = options.cluster.with_cpu_on_links()
    problems = [Problem(measured.graph, measured.profile, replace(cluster, memory=None), placement)]
    if cluster.limits:
        for in_flight in sorted({1, min(count, cluster.ranks)}, reverse=True):
            problem = Problem(measured.graph, measured.profile, cluster, placement, in_flight, options.training)
            problems.append(problem)
    even_stages: Problem | None = None
    if placement is not None and placement.num_stages > placement.num_ranks and find_partitioner(given).is_fast:
        slowness = cluster.slowness_of(placement) if cluster.slowness else None
        stages = Cluster(placement.num_stages, slowness=slowness)
        even_stages = Problem(measured.graph, measured.profile, stages, Placement.loop(placement.num_stages))
        problems.insert(0, even_stages)
    seen: set[tuple[Partition, Placement]] = set()
    for problem in problems:
        try:
            division = _divide(given, problem, joins_light, is_mixed=True)
        except PartitionError:
            if problem.cluster.limits:
                continue  # the cuts that ignore memory are there in any case
            raise
        found = division.placement
        if problem is even_stages:
            assert placement is not None
            found = placement
        cut = division.partition, found
        if cut not in seen and placement in (None, found):
            seen.add(cut)
            layout = _layout(measured, *cut, count, options, given)
            # Without a placement the partitioner may return a loop or a vee, which `_placements` lists anyway, unless
            # the partitioner alone chooses.
            if placement or layout.choices.placement == "mixed" or find_partitioner(given).chooses_placement:
                yield layout


def _layout(
    measured: Measured, partition: Partition, placement: Placement, count: int, options: PlanOptions, name: str
) -> StageLayout:
    """The layout of these cuts on this placement; `name` is that of the partitioner."""
    if partition.num_stages != placement.num_stages:
        raise PlanError(
            "the partition must have as many stages as the schedule",
            partition=partition.num_stages,
            schedule=placement.num_stages,
            hint="stages_per_rank=None, or a schedule for that many stages per rank",
        )
    partition.check(measured.graph)
    schedule = options.schedule if isinstance(options.schedule, str) else GIVEN
    choices = Choices(name, schedule, (False,) * partition.num_stages, placement.kind)
    return StageLayout(measured, partition, placement, count, options.cluster, choices, options.training)


def table_plans(layout: StageLayout, options: PlanOptions) -> Iterator[LayoutPlan]:
    """Yields the plan with the requested schedule; for "auto" with every schedule of the table for the placement.

    With recompute="auto" stages recompute, one more on every rank that lacks memory, until the plan fits.
    """
    asked = options.schedule
    if isinstance(asked, Schedule | Program):
        names = [GIVEN]
    elif asked == AUTO:
        # Schedules that split the backward first: they are mostly faster.
        names = sorted(SCHEDULES, key=lambda name: not SCHEDULES[name].splits_backward)
    else:
        names = [str(asked)]

    def freed_per_second(stage: int) -> float:
        plain, again = (each.kept_bytes for each in (layout.plain_costs, layout.recomputed_costs))
        return (plain[stage] - again[stage]) / max(layout.plain_costs.mean_seconds(Kind.FORWARD)[stage], 1e-12)

    for name in names:
        start = layout.recomputing() if options.recompute == "full" else layout
        found = _plan_with_schedule(start, name, asked)
        while found is not None and options.recompute == AUTO and excess_bytes(found.plan) > 0:
            # On every rank that lacks memory one more stage, which frees the most for its time.
            plan, flags = found.plan, list(found.plan.choices.recompute)
            for stages, peak, limit in zip(
                layout.placement.stages, plan.predicted.peaks, plan.cluster.limits, strict=True
            ):
                left = [stage for stage in stages if not flags[stage]]
                if peak > limit and left:
                    flags[max(left, key=freed_per_second)] = True
            if tuple(flags) == plan.choices.recompute:
                break
            # Certified at the end: the bound of a plan that does not fit is not used.
            more = replace(layout.recomputing(tuple(flags)), is_certified=False)
            found = _plan_with_schedule(more, name, asked)
        if found is not None and layout.is_certified and not found.layout.is_certified:
            # Add the lower bound that was left out above.
            certified = replace(found.layout, is_certified=True)
            bound = min(certified.bound, found.plan.predicted.makespan)
            predicted = replace(found.plan.predicted, lower_bound=bound)
            found = LayoutPlan(replace(found.plan, predicted=predicted), certified)
        if found is not None:
            yield found


def synthesised_plan(layout: StageLayout, budget_seconds: float) -> LayoutPlan:
    """Returns the plan with an order made for these costs and this memory; raises ScheduleError if no order fits."""
    made = synthesise(layout.problem, budget_seconds=budget_seconds)
    return LayoutPlan(layout.plan(made.best.schedule, AUTO, made.bound.seconds), layout)


def _plan_with_schedule(layout: StageLayout, name: str, asked: object) -> LayoutPlan | None:
    """None if the schedule has another placement, or does not support that many stages."""
    if isinstance(asked, Schedule | Program):
        return LayoutPlan(layout.plan(asked, GIVEN), layout)
    built = build_on(layout.placement, name, layout.num_microbatches, layout.costs)
    return LayoutPlan(layout.plan(built, name), layout) if built is not None else None


def excess_bytes(plan: Plan) -> int:
    """Returns the bytes that the worst rank lacks; 0 or less for a plan that fits."""
    # Without limits of memory there is nothing to compare with.
    pairs = zip(plan.predicted.peaks, plan.cluster.limits, strict=False)
    return max((peak - limit for peak, limit in pairs), default=0)
