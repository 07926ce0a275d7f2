"""What is said to be the best equals the best of all, tried one by one on small graphs."""

import random

import pytest

from penstock.errors import PartitionError
from penstock.ir.cluster import Cluster
from penstock.ir.placement import Placement
from penstock.partitioners import Holding, Problem, divide
from tests.partitioners.examples import Trial, outcome, wild

SEEDS = range(500)


def problem_of(seed, num_nodes, placement=None, **cluster):
    """A wild graph for ranks that are alike or not, with messages beside the passes or between them."""
    draw = random.Random(seed)
    ranks = placement.num_ranks if placement else draw.randint(1, 3)
    slowness = tuple(draw.choice([1.0, 1.0, 2.5]) for _ in range(ranks)) if draw.random() < 0.4 else ()
    graph, profile = wild(seed, num_nodes)
    where = Cluster(ranks, **cluster)
    return Problem(graph, profile, where, placement, Holding(2, 2), overlaps=seed % 2 == 0, slowness=slowness)


def has_enough_atoms(problem):
    return len(problem.atoms) >= problem.num_stages


def test_linear_is_the_best_cut_into_runs():
    for seed in SEEDS:
        problem = problem_of(seed, 4 + seed % 5)
        if has_enough_atoms(problem):
            division = divide("linear", problem)
            assert outcome(division) == Trial(problem).best_runs(), seed
            assert division.contiguous_bound_seconds == pytest.approx(division.bottleneck_seconds)


def test_pipedream_is_the_best_cut_into_runs_when_messages_count():
    for seed in SEEDS:
        problem = problem_of(seed, 4 + seed % 5, bandwidth=7.0, latency=seed % 3 / 4)
        if has_enough_atoms(problem):
            assert outcome(divide("pipedream", problem)) == Trial(problem).best_runs(), seed


def test_acyclic_is_the_best_of_all_partitions():
    for seed in SEEDS:
        problem = problem_of(seed, 3 + seed % 4)
        if has_enough_atoms(problem):
            division = divide("acyclic", problem)
            assert outcome(division)[0] == Trial(problem).best_partition()[0], seed
            assert division.lower_bound_seconds == pytest.approx(division.bottleneck_seconds)


def test_acyclic_is_the_best_of_all_partitions_when_messages_count_and_memory_is_short():
    for seed in SEEDS[:120]:
        problem = problem_of(seed, 3 + seed % 4, bandwidth=7.0, memory=400)
        if has_enough_atoms(problem) and Trial(problem).best_partition():
            assert outcome(divide("acyclic", problem)) == Trial(problem).best_partition(), seed


@pytest.mark.parametrize("placement", [Placement.vee(2), Placement.loop(2, 2), Placement.loop(2, 3), Placement.vee(3)])
def test_linear_is_the_best_cut_into_runs_for_the_sums_of_ranks(placement):
    for seed in SEEDS[:50]:
        problem = problem_of(seed, 7 + seed % 4, placement)
        if has_enough_atoms(problem):
            division = divide("linear", problem)
            assert outcome(division)[0] == Trial(problem).best_runs()[0], seed
            assert division.contiguous_bound_seconds == pytest.approx(division.bottleneck_seconds)


def test_limits_of_memory_are_kept_whenever_a_cut_into_runs_can_keep_them():
    for seed in SEEDS[:150]:
        problem = problem_of(seed, 4 + seed % 5, memory=150 + 2 * seed)
        if not has_enough_atoms(problem):
            continue
        if Trial(problem).best_runs() is None:
            with pytest.raises(PartitionError, match="no cut was found that keeps the limits of memory"):
                divide("linear", problem)
        else:
            assert outcome(divide("linear", problem)) == Trial(problem).best_runs(), seed
