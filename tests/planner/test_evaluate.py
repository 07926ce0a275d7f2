"""The fast evaluator of orders agrees with the simulator."""

from dataclasses import replace

import pytest

from benchmarks.instances import Instance, instances
from penstock.ir import Cluster, Cuts, MessageCost, Placement, StageCosts
from penstock.passes import lower
from penstock.planner import ScheduleProblem
from penstock.planner.synthesis.evaluate import critical_chain, evaluate
from penstock.planner.synthesis.problem import rank_orders, to_schedule
from penstock.planner.synthesis.synthesise import low_memory_orders, table_orders
from penstock.schedules import SCHEDULES, build
from penstock.simulate import simulate

SKIP = Cuts(4, ((0, 1), (0, 3), (1, 2), (2, 3)))
SLOW_LINKS = Cluster(4, latency=0.25, bandwidth=4.0)
UNEVEN = StageCosts(
    (1.0, 2.0, 1.5, 3.0),
    (1.5, 1.0, 2.5, 2.0),
    (0.5, 2.0, 1.0, 1.5),
    messages=tuple(MessageCost(source, target, 3 + source, 2 + target) for source, target in SKIP.edges),
)


def agrees(problem: ScheduleProblem, orders: list[list[int]]) -> None:
    trace = simulate(lower(to_schedule(problem, orders), cuts=problem.cuts), problem.costs, problem.cluster)
    assert evaluate(problem, orders).length == pytest.approx(
        trace.span if problem.objective == "span" else trace.makespan, rel=1e-12
    )


@pytest.mark.untraced
@pytest.mark.parametrize("objective", ["makespan", "span"])
@pytest.mark.parametrize("instance", instances(12, seed=41), ids=str)
def test_lengths_are_those_of_the_simulator(instance: Instance, objective: str) -> None:
    problem = replace(instance.problem, objective=objective)
    for order in (*table_orders(problem), *low_memory_orders(problem)):
        agrees(problem, rank_orders(order.schedule))


@pytest.mark.parametrize("name", [name for name in SCHEDULES if build(name, 4, 6).num_stages == 4])
def test_messages_over_slow_links_and_skip_connections_count_alike(name: str) -> None:
    agrees(ScheduleProblem(UNEVEN, Placement.loop(4), 6, SLOW_LINKS, SKIP), rank_orders(build(name, 4, 6)))


def test_orders_that_deadlock_have_no_length() -> None:
    problem = ScheduleProblem.of(StageCosts.uniform(2), Placement.loop(2), 1)
    assert evaluate(problem, [[1, 0], [4, 5]]) == ([], float("inf"))


def test_a_critical_chain_is_as_long_as_the_step() -> None:
    """Without messages, each pass of the chain starts when the next one of it ended."""
    problem = ScheduleProblem(replace(UNEVEN, messages=()), Placement.loop(4), 6, Cluster(4), SKIP)
    orders = rank_orders(build("1f1b", 4, 6))
    ends, length = evaluate(problem, orders)
    chain = critical_chain(problem, orders, ends)
    assert sum(problem.seconds[orders[rank][place]] for rank, place in chain) == pytest.approx(length)
