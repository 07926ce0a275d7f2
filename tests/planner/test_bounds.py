"""No order undercuts the bound, and in easy cases an order meets it."""

from itertools import product

import pytest

from benchmarks.instances import Instance, instances
from penstock.errors import CostError, ScheduleError
from penstock.ir import Cluster, Cuts, MessageCost, Placement, StageCosts
from penstock.planner import ScheduleProblem, synthesise
from penstock.planner.synthesis import lower_bound
from penstock.planner.synthesis.exact import prove
from penstock.planner.synthesis.problem import rank_orders
from penstock.planner.synthesis.synthesise import table_orders
from tests.selection import covered

MOST_PASSES = 36
"""that the solver orders best, without a bound as a hint, in a second or so"""
SMALL = [each for each in instances(80, seed=3, most_ranks=3, microbatches=(1, 4)) if each.num_passes <= MOST_PASSES]


@pytest.mark.untraced
@pytest.mark.parametrize(
    "instance", [*SMALL[:20], *(pytest.param(each, marks=pytest.mark.whole) for each in SMALL[20:40])], ids=str
)
def test_the_optimum_is_never_below_the_bound(instance: Instance) -> None:
    pytest.importorskip("ortools")
    problem = instance.problem
    bound = lower_bound(problem).seconds
    known = rank_orders(synthesise(problem, budget_seconds=0.1, may_prove=False).best.schedule)
    # The solver is not given the bound.
    proof = prove(problem, known, bound=0.0, limit_seconds=60.0)
    assert proof.is_optimal
    assert bound <= proof.seconds * (1 + 1e-9)


@pytest.mark.untraced
@pytest.mark.parametrize(
    ("instance", "overlap", "objective"),
    covered(list(product(instances(12, seed=5), (0.0, 0.5, 1.0), ("makespan", "span")))),
    ids=str,
)
def test_no_schedule_of_the_table_is_below_the_bound(instance: Instance, overlap: float, objective: str) -> None:
    given = instance.problem
    cluster = Cluster(instance.ranks, latency=0.5, bandwidth=3.0, overlap=overlap)
    messages = tuple(MessageCost(s, s + 1, 1 + s % 2, 2) for s in range(given.costs.num_stages - 1))
    costs = StageCosts(
        given.costs.forward,
        given.costs.input_grad,
        given.costs.weight_grad,
        tuple(0.8 * (i + w) for i, w in zip(given.costs.input_grad, given.costs.weight_grad, strict=True)),
        given.costs.activation_bytes,
        messages=messages,
    )
    problem = ScheduleProblem(costs, given.placement, given.num_microbatches, cluster, given.cuts, objective)
    unlimited = lower_bound(problem).seconds
    for order in table_orders(problem):
        limited = ScheduleProblem(
            costs,
            given.placement,
            given.num_microbatches,
            Cluster(instance.ranks, max(order.peaks), 0.5, 3.0, overlap=overlap),
            given.cuts,
            objective,
        )
        bound = lower_bound(limited).seconds
        assert unlimited <= bound * (1 + 1e-9)
        assert bound <= order.seconds * (1 + 1e-9), order.name


@pytest.mark.parametrize("cores", [1, 2, 3])
def test_ranks_that_share_cores_are_not_faster_than_these(cores: int) -> None:
    costs, placement = StageCosts.uniform(4), Placement.loop(4)
    crowded = ScheduleProblem.of(costs, placement, 16, Cluster(4, cores=cores))
    bound = lower_bound(crowded)
    assert bound.seconds == pytest.approx(4 * 16 * 3 / cores)
    assert bound.why == f"work of all ranks on {cores} cores"
    assert all(bound.seconds <= order.seconds for order in table_orders(crowded))


def test_one_rank_works_all_the_time() -> None:
    problem = ScheduleProblem.of(StageCosts((1.0,), (2.0,), (3.0,)), Placement.loop(1), 5)
    assert lower_bound(problem).seconds == pytest.approx(30.0)


def test_without_limits_a_balanced_pipeline_is_filled_and_drained() -> None:
    """The first rank computes all the time, but for the way of its first microbatch there and back."""
    problem = ScheduleProblem.of(StageCosts.uniform(4), Placement.loop(4), 8)
    assert lower_bound(problem).seconds == pytest.approx(8 * 3 + 3)


def test_less_memory_never_lowers_the_bound() -> None:
    costs = StageCosts.uniform(4)
    costs = StageCosts(costs.forward, costs.input_grad, costs.weight_grad, activation_bytes=(1,) * 4)
    bounds = [
        lower_bound(ScheduleProblem.of(costs, Placement.loop(4), 8, Cluster(4, memory=memory))).seconds
        for memory in (8, 4, 3, 2, 1)
    ]
    assert bounds == sorted(bounds)
    assert bounds[-1] > 1.5 * bounds[0]


def test_memory_that_is_never_filled_does_not_raise_the_bound() -> None:
    costs = StageCosts.uniform(4)
    costs = StageCosts(costs.forward, costs.input_grad, costs.weight_grad, activation_bytes=(1,) * 4)
    bounds = [
        lower_bound(ScheduleProblem.of(costs, Placement.loop(4), 8, Cluster(4, memory=memory))).seconds
        for memory in (None, 1000)
    ]
    assert bounds[0] == bounds[1]


def test_the_bound_has_a_reason() -> None:
    costs = StageCosts((1.0, 1.0), (1.0, 1.0), (1.0, 1.0), activation_bytes=(1, 1))
    assert "rank" in lower_bound(ScheduleProblem.of(costs, Placement.loop(2), 4, Cluster(2, memory=1))).why


def test_branches_run_beside_each_other() -> None:
    """Stages 1 and 2 both read stage 0, and stage 3 reads both."""
    cuts = Cuts(4, ((0, 1), (0, 2), (1, 3), (2, 3)))
    branched = ScheduleProblem(StageCosts.uniform(4), Placement.loop(4), 6, Cluster(4), cuts)
    chain = ScheduleProblem.of(StageCosts.uniform(4), Placement.loop(4), 6)
    assert lower_bound(branched).seconds < lower_bound(chain).seconds
    found = synthesise(branched, budget_seconds=0.3)
    assert found.seconds < synthesise(chain, budget_seconds=0.3).seconds
    assert found.bound.seconds <= found.seconds


@pytest.mark.parametrize("microbatches", [0, -1, 1.5, "4", None])
def test_a_wrong_number_of_microbatches_is_refused(microbatches: object) -> None:
    with pytest.raises(ScheduleError, match="microbatches"):
        ScheduleProblem.of(StageCosts.uniform(2), Placement.loop(2), microbatches)  # type: ignore[arg-type]


def test_inconsistent_arguments_are_refused() -> None:
    with pytest.raises(CostError, match="stages"):
        ScheduleProblem.of(StageCosts.uniform(3), Placement.loop(2), 4)
    with pytest.raises(CostError, match="ranks"):
        ScheduleProblem.of(StageCosts.uniform(2), Placement.loop(2), 4, Cluster(3))
    with pytest.raises(ScheduleError, match="objective"):
        ScheduleProblem(StageCosts.uniform(2), Placement.loop(2), 4, Cluster(2), Cuts.chain(2), "speed")
