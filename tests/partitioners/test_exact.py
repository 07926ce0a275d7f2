"""A partition with a proof of optimality is the best of all partitions of small graphs."""

import random
from itertools import count, islice

import pytest

from penstock.errors import PartitionError
from penstock.ir import Cluster, Placement, TrainingState
from penstock.partitioners import Problem, divide
from tests.partitioners.examples import Trial, outcome, wild


@pytest.fixture
def problems(is_whole):
    """Of so many wild graphs the first third, or the whole."""

    def drawn(number, sizes, placement=None, **cluster):
        found = (problem_of(seed, sizes[seed % len(sizes)], placement, cluster) for seed in count())
        large_enough = (problem for problem in found if len(problem.atoms) >= problem.num_stages)
        return islice(large_enough, number if is_whole else number // 3)

    return drawn


def problem_of(seed, num_nodes, placement, cluster):
    """For ranks that are alike or not, with messages beside the passes or between them."""
    draw = random.Random(seed)
    ranks = placement.num_ranks if placement else draw.randint(1, 3)
    slowness = tuple(draw.choice([1.0, 1.0, 2.5]) for _ in range(ranks)) if draw.random() < 0.4 else None
    where = Cluster(ranks, slowness=slowness, **cluster)
    memory = {"in_flight": 2, "training": TrainingState("adamw")}
    return Problem(*wild(seed, num_nodes), where, placement, overlaps=draw.random() < 0.5, **memory)


@pytest.mark.untraced
def test_linear_is_the_best_cut_into_runs(problems):
    for problem in problems(500, sizes=(4, 5, 6, 7)):
        division = divide("linear", problem)
        assert outcome(division) == Trial(problem).best_runs()
        assert division.contiguous_bound_seconds == pytest.approx(division.bottleneck_seconds)


@pytest.mark.untraced
@pytest.mark.parametrize("latency", [0.0, 0.5])
def test_pipedream_is_the_best_cut_into_runs_when_messages_count(problems, latency):
    for problem in problems(250, sizes=(4, 5, 6, 7), bandwidth=7.0, latency=latency):
        assert outcome(divide("pipedream", problem)) == Trial(problem).best_runs()


@pytest.mark.untraced
def test_acyclic_is_the_best_of_all_partitions(problems):
    for problem in problems(200, sizes=(3, 4, 5)):
        division = divide("acyclic", problem)
        assert outcome(division)[0] == Trial(problem).best_partition()[0]
        assert division.lower_bound_seconds == pytest.approx(division.bottleneck_seconds)


def test_acyclic_is_the_best_of_all_partitions_when_messages_count_and_memory_is_short(problems):
    for problem in problems(100, sizes=(3, 4, 5, 6), bandwidth=7.0, memory=400):
        if best := Trial(problem).best_partition():
            assert outcome(divide("acyclic", problem)) == best


@pytest.mark.parametrize("placement", [Placement.vee(2), Placement.loop(2, 2), Placement.loop(2, 3), Placement.vee(3)])
def test_linear_is_the_best_cut_into_runs_for_the_sums_of_ranks(problems, placement):
    for problem in problems(50, sizes=(7, 8, 9, 10), placement=placement):
        division = divide("linear", problem)
        assert outcome(division)[0] == Trial(problem).best_runs()[0]
        assert division.contiguous_bound_seconds == pytest.approx(division.bottleneck_seconds)


@pytest.mark.parametrize("memory", [200, 300, 400])
def test_limits_of_memory_are_kept_whenever_a_cut_into_runs_can_keep_them(problems, memory):
    for problem in problems(50, sizes=(4, 5, 6, 7, 8), memory=memory):
        if best := Trial(problem).best_runs():
            assert outcome(divide("linear", problem)) == best
        else:
            with pytest.raises(PartitionError, match="no cut was found that keeps the limits of memory"):
                divide("linear", problem)
