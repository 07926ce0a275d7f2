"""Costs per microbatch in simulation, bounds and synthesis."""

from dataclasses import replace
from itertools import permutations
from random import Random

import pytest

from penstock.errors import CostError
from penstock.ir import Cluster, MessageCost, Placement, StageCosts, from_json, to_json
from penstock.passes import lower
from penstock.planner import ScheduleProblem, synthesise
from penstock.planner.synthesis import lower_bound
from penstock.planner.synthesis.evaluate import critical_chain, evaluate
from penstock.planner.synthesis.problem import rank_orders
from penstock.schedules import build
from penstock.simulate import simulate

MICROBATCHES = 4


def costs_of(seed: int, stages: int, microbatches: int = MICROBATCHES) -> StageCosts:
    random = Random(seed)

    def seconds(least: float) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(random.uniform(least, 3.0) for _ in range(microbatches)) for _ in range(stages))

    sizes = tuple(tuple(random.randrange(1, 9) for _ in range(microbatches)) for _ in range(stages))
    messages = tuple(MessageCost(stage, stage + 1, 2, 1) for stage in range(stages - 1))
    return StageCosts(seconds(0.5), seconds(0.5), seconds(0.1), activation_bytes=sizes, messages=messages)


def reordered(costs: StageCosts, order: tuple[int, ...]) -> StageCosts:
    names = ("forward", "input_grad", "weight_grad", "backward", "activation_bytes", "weight_grad_bytes")
    return replace(
        costs, **{name: tuple(tuple(each[m] for m in order) for each in getattr(costs, name)) for name in names}
    )


def test_a_step_takes_the_seconds_of_each_microbatch():
    costs = StageCosts(((1.0, 5.0), 1.0), ((1.0, 5.0), 1.0), (0.0, 0.0), activation_bytes=((10, 50), 1))
    trace = simulate(lower(build("gpipe", 2, 2)), costs)
    # 0F0 0F1 1F1 1B0 1B1 0B1, with 0B0 beside 1B1.
    assert trace.makespan == 1 + 5 + 1 + 1 + 1 + 5
    assert trace.peak_bytes(0) == 60
    assert trace.peak_bytes(1) == 2
    assert costs.mean().forward == (3.0, 1.0)
    assert costs.most().activation_bytes == (50, 1)
    assert costs.times((2.0, 1.0)).forward == ((2.0, 10.0), 1.0)


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "interleaved", "dualpipe_v"])
def test_equal_microbatches_cost_the_same_as_a_number_per_stage(name):
    schedule = build(name, 4, 6)
    one = StageCosts.uniform(schedule.num_stages, 1.0, 1.5, 0.5)
    kinds = ("forward", "input_grad", "weight_grad")
    each = StageCosts(*(tuple((value,) * 6 for value in getattr(one, kind)) for kind in kinds))
    assert simulate(lower(schedule), each) == simulate(lower(schedule), one)
    problems = [ScheduleProblem.of(costs, schedule.placement, 6) for costs in (one, each)]
    assert lower_bound(problems[0]).seconds == pytest.approx(lower_bound(problems[1]).seconds)


@pytest.mark.parametrize("seed", range(6))
def test_the_search_counts_as_the_simulator_does(seed):
    costs = costs_of(seed, 3)
    problem = ScheduleProblem.of(costs, Placement.loop(3), MICROBATCHES, Cluster(3, latency=0.1, bandwidth=10.0))
    for name in ("1f1b", "zb_h1", "gpipe"):
        schedule = build(name, 3, MICROBATCHES, costs=costs)
        orders = rank_orders(schedule)
        found = evaluate(problem, orders)
        assert found.length == pytest.approx(simulate(lower(schedule), costs, problem.cluster).makespan)
        assert critical_chain(problem, orders, found.ends)[-1][1] == 0


@pytest.mark.untraced
@pytest.mark.parametrize("seed", range(4))
def test_no_order_of_microbatches_undercuts_the_bound(seed):
    costs = costs_of(seed, 2, 3)
    problem = ScheduleProblem.of(costs, Placement.loop(2), 3)
    bound = lower_bound(problem)
    best = min(
        synthesise(replace(problem, costs=reordered(costs, order)), budget_seconds=0.05).seconds
        for order in permutations(range(3))
    )
    assert bound.seconds <= best * (1 + 1e-9)
    assert bound.seconds >= 0.6 * best


def test_a_synthesised_order_is_no_worse_than_the_table_and_keeps_to_memory():
    costs = costs_of(7, 4)
    problem = ScheduleProblem.of(costs, Placement.loop(4), MICROBATCHES, Cluster(4, memory=24))
    made = synthesise(problem, budget_seconds=0.2)
    assert made.best.fits
    assert made.seconds <= min(order.seconds for order in made.named)
    assert made.bound.seconds <= made.seconds


def test_one_long_microbatch_bounds_the_step():
    costs = StageCosts(((0.1, 9.0, 0.1),) * 2, ((0.1, 9.0, 0.1),) * 2, (0.0, 0.0))
    bound = lower_bound(ScheduleProblem.of(costs, Placement.loop(2), 3))
    assert bound.seconds >= 36.0 * (1 - 1e-6)
    span = lower_bound(replace(ScheduleProblem.of(costs, Placement.loop(2), 3), objective="span"))
    assert 18.0 <= span.seconds <= bound.seconds
    shared = lower_bound(ScheduleProblem.of(costs, Placement.loop(2), 3, Cluster(2, cores=1)))
    assert shared.seconds >= sum(map(sum, costs.forward + costs.backward)) * (1 - 1e-6)


def test_costs_round_trip_through_json_and_are_checked():
    costs = costs_of(1, 2)
    assert from_json(to_json(costs)) == costs
    for wrong, text in (
        ({"forward": ((1.0, 2.0), (1.0,))}, "same number of microbatches"),
        ({"forward": ((), 1.0)}, "a number per microbatch"),
        ({"forward": ((1.0, -1.0), 1.0)}, "finite number"),
    ):
        with pytest.raises(CostError, match=text):
            StageCosts(**{"forward": (1.0, 1.0), "input_grad": (1.0, 1.0), "weight_grad": (1.0, 1.0)} | wrong)
    for call in (
        lambda: simulate(lower(build("1f1b", 2, 3)), costs),
        lambda: ScheduleProblem.of(costs, Placement.loop(2), 3),
        lambda: build("zb_h1", 2, 3, costs=costs),
    ):
        with pytest.raises(CostError, match="one number per microbatch"):
            call()
