"""Space: the drafts that a request leaves open."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from penstock.errors import PartitionError, PlanError
from penstock.ir import Choices, Cluster, Partition, Placement, Schedule
from penstock.partitioners import Holding, Problem, by_modules, divide, find
from penstock.planner.draft import GIVEN, Draft, placement_name
from penstock.planner.measured import Measured, Models
from penstock.planner.request import AUTO, Request
from penstock.schedules import build

_DEPTHS = (1, 2, 3, 4)
"""stages per rank that are looked at where the request leaves them open"""
_FIRST = "linear"
"""cuts in no time what most models are best cut like"""
_FURTHER = ("pipedream", "acyclic")
_MIXED = "mpipe"
_THRIFTY = "pipedream"
_THRIFT = 4.0
"""how many times slower links are taken to be for cuts with fewer bytes"""


def drafts(models: Models, request: Request) -> Iterator[Draft]:
    """For every number of microbatches and every placement the cuts that suit it; refused if there are none.

    Where the partitioner is left open, linear cuts; `further` has the others.
    """
    if request.partitioner == AUTO:
        request = replace(request, partitioner=_FIRST)
    refused: PartitionError | None = None
    is_any = False
    for count, measured in models.items():
        for placement in _placements(request, count):
            try:
                for draft in _drafts(measured, placement, count, request):
                    is_any = True
                    yield draft
            except PartitionError as error:
                refused = refused or error
    if refused is not None and not is_any:
        raise refused


def further(draft: Draft, request: Request) -> Iterator[Draft]:
    """Other cuts for the same placement and, where that is open as well, stages of one rank wherever they suit it."""
    if request.partitioner != AUTO:
        return
    yield from _thrifty(draft, request)
    for name in _FURTHER:
        asked = replace(request, partitioner=name)
        with suppress(PartitionError):
            yield from _drafts(draft.measured, draft.placement, draft.num_microbatches, asked)
    if request.schedule == AUTO and request.stages_per_rank is None:
        problem = Problem(draft.measured.graph, draft.measured.profile, replace(request.cluster, memory=None))
        with suppress(PartitionError):
            found = divide(_MIXED, problem)
            yield _draft(draft.measured, found.partition, found.placement, draft.num_microbatches, (request, _MIXED))


def _thrifty(draft: Draft, request: Request) -> Iterator[Draft]:
    """Cuts with fewer bytes than a partitioner asks for.

    That lets messages be as long as the passes behind which they hide; but the first and the last ones hide behind
    nothing, and where few microbatches are in flight hardly any does.
    """
    cluster, slower = request.cluster, _slower(request.cluster)
    if slower == cluster:
        return
    problem = Problem(draft.measured.graph, draft.measured.profile, replace(slower, memory=None), draft.placement)
    with suppress(PartitionError):
        found = divide(_THRIFTY, problem)
        if found.placement == draft.placement:
            asked = (request, _THRIFTY)
            yield _draft(draft.measured, found.partition, draft.placement, draft.num_microbatches, asked)


def _slower(cluster: Cluster) -> Cluster:
    """The same ranks with slower links, if they have a limit at all."""
    links = tuple(replace(link, bandwidth=link.bandwidth and link.bandwidth / _THRIFT) for link in cluster.links)
    return replace(cluster, bandwidth=cluster.bandwidth and cluster.bandwidth / _THRIFT, links=links)


def _placements(request: Request, count: int) -> list[Placement]:
    """Where the stages may lie, for the schedule that is asked for."""
    ranks, depth = request.cluster.ranks, _depth(request)
    asked = request.schedule
    if isinstance(asked, Schedule):
        return [_of_given(asked, count, request)]
    if asked != AUTO:
        return [build(asked, ranks, count, depth).placement]
    depths = _DEPTHS if depth is None else (depth,)
    loops = [Placement.loop(ranks, depth) for depth in depths]
    # On one rank a vee is a loop.
    return [*loops, Placement.vee(ranks)] if 2 in depths and ranks > 1 else loops


def _of_given(schedule: Schedule, count: int, request: Request) -> Placement:
    found = {"ranks": schedule.num_ranks, "microbatches": schedule.num_microbatches}
    asked = {"ranks": request.cluster.ranks, "microbatches": count}
    if found != asked:
        hint = "ranks={ranks}, microbatches={microbatches}".format(**found)
        raise PlanError("the schedule is for other numbers than asked for", schedule=found, asked=asked, hint=hint)
    return schedule.placement


def _depth(request: Request) -> int | None:
    """Stages per rank: those asked for, or as many as the given stages make."""
    given = request.partitioner
    if request.stages_per_rank is not None or isinstance(given, str):
        return request.stages_per_rank
    stages = given.num_stages if isinstance(given, Partition) else len(given)
    if stages % request.cluster.ranks:
        hint = "as many lists for every rank"
        raise PlanError(
            "the stages do not divide among the ranks", stages=stages, ranks=request.cluster.ranks, hint=hint
        )
    return stages // request.cluster.ranks


def _drafts(measured: Measured, placement: Placement, count: int, request: Request) -> Iterator[Draft]:
    given = request.partitioner
    if not isinstance(given, str):
        partition = given if isinstance(given, Partition) else by_modules(measured.graph, given)
        yield _draft(measured, partition, placement, count, (request, GIVEN))
        return
    seen: set[Partition] = set()
    for problem in _problems(measured, placement, count, request):
        try:
            division = divide(given, problem)
        except PartitionError:
            if problem.cluster.limits:
                continue  # the cuts that look at no memory are there in any case
            raise
        if division.partition not in seen and division.placement == placement:
            seen.add(division.partition)
            yield _draft(measured, division.partition, placement, count, (request, find(given).name))


def _problems(measured: Measured, placement: Placement, count: int, request: Request) -> Iterator[Problem]:
    """Cut for time alone and, where memory is limited, also so that what is held fits."""
    cluster = request.cluster
    yield Problem(measured.graph, measured.profile, replace(cluster, memory=None), placement)
    if cluster.limits:
        for in_flight in sorted({1, min(count, cluster.ranks)}, reverse=True):
            yield Problem(measured.graph, measured.profile, cluster, placement, Holding(in_flight))


def _draft(
    measured: Measured, partition: Partition, placement: Placement, count: int, asked: tuple[Request, str]
) -> Draft:
    request, name = asked
    if partition.num_stages != placement.num_stages:
        raise PlanError(
            "the partition has another number of stages",
            partition=partition.num_stages,
            schedule=placement.num_stages,
            hint="stages_per_rank=None, or a schedule for so many stages per rank",
        )
    partition.check(measured.graph)
    schedule = request.schedule if isinstance(request.schedule, str) else GIVEN
    choices = Choices(name, schedule, (False,) * partition.num_stages, placement_name(placement))
    return Draft(measured, partition, placement, count, request.cluster, choices)
