"""Groups of samples by length, their costs and their order."""

from random import Random

import numpy as np
import pytest

from penstock.errors import RunError
from penstock.ir import Cluster, Kind, StageCosts
from penstock.passes import lower
from penstock.planner import TokenGroup, TokenPlanner, balance, group_samples, padded_length
from penstock.schedules import build
from penstock.simulate import Makespans, simulate
from tests.plans import chain_plan


def lengths_of(seed: int, count: int = 48) -> list[int]:
    random = Random(seed)
    return [max(1, min(500, int(random.lognormvariate(4, 1)))) for _ in range(count)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_groups_hold_every_sample_once_within_the_budget(seed, share):
    lengths = lengths_of(seed)
    groups = group_samples(lengths, 512, max(lengths), share)
    assert sorted(sample for group in groups for sample in group.samples) == list(range(len(lengths)))
    for group in groups:
        assert group.tokens <= 512
        assert max(lengths[sample] for sample in group.samples) <= group.length <= max(lengths)
        assert group.tokens <= 512 * share or len(group.samples) == 1


def test_padded_lengths_are_few_and_close():
    padded = [padded_length(length, 4096) for length in range(1, 4097)]
    assert len(set(padded)) == 8 + 6 * 8
    assert all(length <= rounded <= max(length + 7, length * 9 / 8) for length, rounded in enumerate(padded, 1))
    assert padded_length(100, 101) == 101


def test_a_sample_beyond_the_budget_is_refused():
    with pytest.raises(RunError, match="at least the length of the longest sample") as caught:
        group_samples([3, 9], 8, 9)
    assert caught.value.values == {"got": 8, "longest": 9, "sample": 1}


def test_parts_of_replicas_are_balanced():
    parts = balance([float(length) for length in lengths_of(0)], 3)
    sums = [sum(lengths_of(0)[item] for item in part) for part in parts]
    assert max(sums) - min(sums) <= max(lengths_of(0)) / 10
    assert sorted(item for part in parts for item in part) == list(range(48))


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "dualpipe_v"])
@pytest.mark.parametrize("cores", [None, 2])
def test_makespans_are_those_of_the_simulator(name, cores):
    schedule, random = build(name, 3, 5), Random(1)
    stages, cluster = schedule.num_stages, Cluster(3, latency=0.1, bandwidth=4.0, cores=cores)
    seconds = [tuple(tuple(random.uniform(1, 3) for _ in range(5)) for _ in range(stages)) for _ in range(3)]
    costs = StageCosts(*seconds)
    by_kind = np.zeros((len(Kind), stages, 5))
    for kind, field in ((Kind.FORWARD, "forward"), (Kind.INPUT_GRAD, "input_grad"), (Kind.WEIGHT_GRAD, "weight_grad")):
        by_kind[kind] = getattr(costs, field)
    by_kind[Kind.BACKWARD] = costs.backward
    program = lower(schedule)
    expected = simulate(program, costs, cluster).makespan
    assert Makespans(program, costs, cluster)(by_kind, np.ones(5)) == pytest.approx(expected, rel=1e-12)


def recorded(planner: TokenPlanner, groups: list[TokenGroup], seconds: object):
    """A trace whose forwards and backwards take `seconds(group)` and twice that."""
    plan = chain_plan("1f1b", 2, 1, 4)
    each = tuple(seconds(group) for group in groups)
    program = lower(build("1f1b", 2, len(groups)), cuts=plan.cuts)
    return simulate(program, StageCosts((each, each), (each, each), (each, each)))


@pytest.mark.parametrize("parts", [(1e-3, 2e-5, 0.0), (0.0, 1e-5, 0.0), (0.0, 1e-5, 1e-7), (1e-3, 1e-5, 1e-7)])
def test_costs_are_fitted_to_recorded_passes(parts):
    planner = TokenPlanner(chain_plan("1f1b", 2, 1, 4), 64.0)

    def seconds(group):
        return parts[0] + parts[1] * group.tokens + parts[2] * group.tokens * group.length

    for seed in range(2):
        groups = group_samples(lengths_of(seed), 512, 500)
        planner.add(recorded(planner, groups, seconds), groups)
    others = [TokenGroup((0, 1), 100), TokenGroup((2,), 30)]
    found = planner.costs.seconds(others)
    assert found[Kind.FORWARD, 0].tolist() == pytest.approx([seconds(group) for group in others], rel=1e-6)
    assert found[Kind.BACKWARD, 1].tolist() == pytest.approx([2 * seconds(group) for group in others], rel=1e-6)


def test_the_chosen_order_is_no_worse_than_that_of_lengths():
    plan = chain_plan("1f1b", 2, 1, 4)
    planner, lengths = TokenPlanner(plan, 64.0), lengths_of(3)
    chosen = planner.groups(lengths, 512, max(lengths))

    def predicted(groups):
        makespans = Makespans(lower(build("1f1b", 2, len(groups)), cuts=plan.cuts), plan.costs, plan.cluster)
        return makespans(planner.costs.seconds(groups), np.ones(len(groups)))

    by_length = group_samples(lengths, 512, max(lengths))
    assert predicted(chosen) <= min(predicted(by_length), predicted(by_length[::-1]))
    # Other samples with the same lengths are grouped alike.
    again = planner.groups(lengths[::-1], 512, max(lengths))
    assert [(len(group.samples), group.length) for group in again] == [(len(g.samples), g.length) for g in chosen]
