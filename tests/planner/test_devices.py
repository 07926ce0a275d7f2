"""Divisions of devices into replicas and pipeline ranks."""

import pytest

from penstock.errors import FitError, PlanError
from penstock.ir import Cluster, Replicas
from penstock.planner import PlanOptions, best_device_plan, device_layouts
from tests.planner.chains import measured

LAYERS = measured([4e-3] * 8)
CLUSTERS = {ranks: Cluster(ranks) for ranks in (1, 2, 4, 8)}


def layouts(between=Replicas(), options=PlanOptions(8, budget_seconds=0.2), clusters=CLUSTERS, samples=16):  # noqa: B008
    return device_layouts({1: LAYERS}, options, 8, samples, clusters, between)


def test_without_costs_of_replicas_none_are_in_a_pipeline():
    found = layouts()
    assert (found[0].replicas, found[0].ranks) == (8, 1)
    assert {(each.replicas, each.ranks, each.microbatches) for each in found} == {
        *((8, 1, 2), (4, 2, 4), (2, 4, 8), (1, 8, 16))
    }
    plan = best_device_plan(found)
    assert plan.cluster.replicas.count == 8
    assert any("8 x 1" in line for line in plan.search.reasons)


def test_slow_links_between_replicas_make_pipelines_worth_it():
    found = layouts(between=Replicas(1, 0.0, 1e3))
    assert found[0].replicas == 1
    steps = [each.plan.predicted.makespan for each in found]
    assert steps == sorted(steps)


def test_a_division_that_does_not_fit_is_listed_with_the_reason():
    limited = {ranks: Cluster(ranks, memory=9000) for ranks in CLUSTERS}
    found = layouts(clusters=limited)
    assert found[0].plan is not None
    assert found[-1].plan is None
    assert "no plan fits in memory" in found[-1].row[-1]
    with pytest.raises(FitError, match="no division of 8 devices fits: parameters, gradients and optimizer"):
        layouts(clusters={ranks: Cluster(ranks, memory=100) for ranks in CLUSTERS})


def test_a_batch_that_no_division_suits():
    with pytest.raises(PlanError, match="no division of the devices suits the batch"):
        layouts(clusters={2: Cluster(2)}, samples=3)
