"""The score of a partition: the costs of its stages, summed per rank."""

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from benchmarks.graphs import chain
from penstock.ir import Cluster, Link, Placement, TensorSpec, TrainingState, Value, compute_stage_costs
from penstock.partitioners import Problem
from penstock.partitioners.costs import Box, CostRates, Runs
from penstock.partitioners.score import Score, partition_of
from penstock.partitioners.search.boundaries import stages_of
from tests.partitioners.examples import wild


def bounds_at_random(problem, seed):
    number = len(problem.atoms)
    return [0, *sorted(random.Random(seed).sample(range(1, number), problem.num_stages - 1)), number]


def wild_problems(number, knows_held=False, **options):
    for seed in range(number):
        graph, profile = wild(seed, 12, knows_held)
        memory = {"in_flight": (3, 2, 1), "training": TrainingState("adamw")}
        problem = Problem(graph, profile, Cluster(3, bandwidth=7.0, latency=0.5), **memory, **options)
        if len(problem.atoms) >= 3:
            yield problem, bounds_at_random(problem, seed)


@pytest.mark.parametrize("knows_held", [False, True])
def test_seconds_and_bytes_of_stages_are_those_of_fold(knows_held):
    for problem, bounds in wild_problems(100, knows_held):
        score = Score(problem, problem.atoms, stages_of(bounds))
        partition = partition_of(problem, problem.atoms, score.stage)
        costs = compute_stage_costs(problem.graph, problem.profile, partition, training=TrainingState("adamw"))
        assert score.stage_seconds == pytest.approx(np.add(costs.forward, costs.backward))
        state = [each.total for each in costs.state]
        assert score.memory == pytest.approx(np.add(state, np.multiply((3, 2, 1), costs.activation_bytes)))
        once = sum(value.spec.bytes for value in problem.graph.parameters)
        held = [each.parameters for each in costs.state]
        sent = sum(message.forward_bytes + message.backward_bytes for message in costs.messages)
        unused = once - sum(value.spec.bytes for value in problem.graph.parameters if is_used(problem.graph, value))
        assert score.cut_bytes == sent + sum(held) - (once - unused)


def is_used(graph, parameter):
    return any(parameter.name in node.parameters for node in graph.nodes)


@pytest.mark.parametrize("overlaps", [True, False])
def test_the_cost_of_a_run_is_that_of_its_stage(overlaps):
    for problem, bounds in wild_problems(60, overlaps=overlaps):
        score, rates, number = Score(problem, problem.atoms, stages_of(bounds)), CostRates.of(problem), bounds[-1]
        costs = Runs(problem.atoms).costs(Box(0, number, 0, number), with_sent=True)
        runs = [(stage, low, high) for stage, (low, high) in enumerate(pairwise(bounds))]
        assert score.loads == pytest.approx([rates.loads(costs)[run] for run in runs])
        assert score.memory == pytest.approx([rates.memory(costs)[run] for run in runs])


def test_a_box_of_runs_is_a_part_of_all_runs():
    graph, profile = wild(5, 14)
    runs = Runs(Problem(graph, profile, Cluster(1)).atoms)
    number = len(runs.atoms)
    for box in (Box(0, 3, 2, 6), Box(2, 5, 5, number), Box(1, 1, 4, 4)):
        rows, columns = slice(box.first, box.last + 1), slice(box.low, box.high + 1)
        assert (runs.bytes(box) == runs.bytes(Box(0, number, 0, number))[rows, columns]).all()


def test_values_between_stages_of_one_rank_are_not_messages():
    problem = Problem(*chain([1, 1, 1, 1], [5, 7, 9, 1]), Cluster(2, bandwidth=1.0), Placement.vee(2))
    score = Score(problem, problem.atoms, stages_of([0, 1, 2, 3, 4]))
    assert score.cut_bytes == 5 + 9
    assert score.loads.tolist() == [9.0, 5.0]


def test_links_have_their_own_bandwidth_and_latency():
    links = (Link(0, 1, bandwidth=5.0, latency=0.25), Link(1, 0, bandwidth=2.5, latency=0.5))
    graph, profile = chain([1, 1], [10, 1])
    made = replace(graph.nodes[0], makes=(Value("0", TensorSpec((10,), "uint8", requires_grad=True)),))
    graph = replace(graph, nodes=(made, graph.nodes[1]))
    problem = Problem(graph, replace(profile, fingerprint=graph.fingerprint), Cluster(2, links=links))
    assert Score(problem, problem.atoms, np.array([0, 1])).loads.tolist() == [1.0, 4.0]
    waiting = replace(problem, overlaps=False)
    assert Score(waiting, waiting.atoms, np.array([0, 1])).loads.tolist() == [1 + 2 + 4 + 0.75] * 2


def test_a_slow_rank_takes_as_many_times_longer():
    problem = Problem(*chain([3, 5]), Cluster(2, slowness=(2.0, 1.0)))
    assert Score(problem, problem.atoms, np.array([0, 1])).loads.tolist() == [6.0, 5.0]
