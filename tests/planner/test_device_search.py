"""Divisions of devices into replicas, pipeline ranks and tensor-parallel ranks."""

from dataclasses import replace

import pytest

from penstock.errors import FitError, PlanError
from penstock.ir import DeviceLayout, LinkSpeed, Replicas, TrainingState, from_json, to_json
from penstock.planner import (
    DevicePool,
    DeviceSearch,
    Measured,
    PlanOptions,
    TensorParallel,
    split_tensors,
)
from tests.planner.chains import measured

LAYERS = measured([4e-3] * 8)
QUICK = PlanOptions(1, budget_seconds=0.2)
FAST, SLOW = LinkSpeed(1e12, 0.0), LinkSpeed(1e5, 0.0)


def searched(pool=DevicePool(8), options=QUICK, samples=16, degrees=(1,)):  # noqa: B008
    return DeviceSearch({1: LAYERS}, options, pool, samples, TensorParallel(degrees)).best()


def test_without_costs_of_replicas_none_are_in_a_pipeline():
    plan = searched()
    layouts = plan.search.layouts
    assert {(each.replicas, each.ranks, each.microbatches) for each in layouts} == {
        *((8, 1, 2), (4, 2, 4), (2, 4, 8), (1, 8, 16))
    }
    assert (layouts[0].replicas, plan.cluster.replicas.count, plan.num_ranks) == (8, 8, 1)
    assert [not each.lost for each in layouts] == [True] + [False] * (len(layouts) - 1)


def test_slow_links_between_replicas_make_pipelines_worth_it():
    chosen, *others = searched(DevicePool(8, within=SLOW)).search.layouts
    assert chosen.replicas < 8
    assert chosen.makespan <= min(each.makespan for each in others if each.makespan is not None)


def test_replicas_of_one_node_reduce_within_it_first():
    apart = Replicas(8, 0.0, 1e9)
    together = Replicas(8, 0.0, 1e9, per_node=4, node_bandwidth=1e12)
    # Between two nodes every replica sends a quarter of the bytes.
    assert together.reduction_seconds(1e9) == pytest.approx(0.25 + 1.5e-3)
    assert apart.reduction_seconds(1e9) == pytest.approx(1.75)


def test_a_layout_that_does_not_fit_is_listed_with_the_reason():
    layouts = searched(DevicePool(8, memory=9000)).search.layouts
    assert layouts[0].peak <= 9000
    assert any("of 8.79 KiB per rank" in each.lost for each in layouts)
    with pytest.raises(FitError, match=r"no division of 8 devices fits.*parameters, gradients and optimizer take"):
        searched(DevicePool(8, memory=100))


def test_a_division_that_does_not_suit_the_batch_is_listed_with_the_reason():
    layouts = searched(samples=4).search.layouts
    assert "4 samples are not a multiple of 8 replicas" in [each.lost for each in layouts]
    with pytest.raises(PlanError, match="no division of the devices suits the batch"):
        DeviceSearch({2: LAYERS}, QUICK, DevicePool(8), 3).best()


def test_many_microbatches_are_extrapolated_to_the_simulated_step():
    layout = DeviceLayout(1, 4, 1, 1, 23, stages_per_rank=2, schedule="interleaved")
    pool = DevicePool(4, within=FAST)
    predicted = DeviceSearch({1: LAYERS}, QUICK, pool, 203).simulated(replace(layout, microbatches=203))
    given = replace(QUICK, schedule="interleaved", stages_per_rank=2)
    plan = DeviceSearch({1: LAYERS}, given, pool, 203).best()
    alike = next(each for each in plan.search.layouts if each.ranks == 4)
    assert predicted.makespan == pytest.approx(alike.makespan, rel=1e-9)
    assert predicted.bubble == pytest.approx(alike.bubble, abs=1e-9)


def test_tensor_parallelism_divides_work_and_matrices_and_adds_collectives():
    graph, profile = split_tensors(LAYERS, 4, LinkSpeed(1e6, 0.0))
    # A ring of 4 ranks; half an all-reduce of the 128 bytes that the one matrix of a layer makes.
    collective = 0.5 * 2 * 3 / 4 * 128 / 1e6
    cost = profile.costs[0]
    assert cost.forward == pytest.approx(1e-3 + collective)
    assert cost.backward == pytest.approx(2e-3 + collective)
    assert cost.input_grad + cost.weight_grad == pytest.approx(cost.backward)
    assert graph.parameters[0].spec.bytes * 4 == LAYERS.graph.parameters[0].spec.bytes


def test_a_plan_with_tensor_parallelism_is_of_the_whole_model():
    plan = searched(DevicePool(8, within=FAST), degrees=(2,))
    assert plan.graph == LAYERS.graph
    assert {each.tensor_parallel for each in plan.search.layouts} == {2}
    assert sum(state.parameters for state in plan.costs.state) * 2 == sum(
        value.spec.bytes for value in LAYERS.graph.parameters
    )


def test_sequence_parallelism_splits_values_between_nodes_and_gathers_inputs_again():
    link = LinkSpeed(1e6, 0.0)
    graph, profile = split_tensors(LAYERS, 4, link, TensorParallel(sequence_parallel=True))
    _, whole = split_tensors(LAYERS, 4, link)
    name = LAYERS.graph.nodes[0].name
    assert graph.spec(name).bytes * 4 == LAYERS.graph.spec(name).bytes
    cost, before = profile.costs[0], whole.costs[0]
    assert cost.forward == before.forward
    assert cost.backward - before.backward == pytest.approx(0.5 * (before.forward - 1e-3))


def test_overlapped_collectives_are_hidden_by_the_work_of_their_node():
    overlapped = TensorParallel(overlap_collectives=True)
    _, hidden = split_tensors(LAYERS, 4, LinkSpeed(1e6, 0.0), overlapped)
    assert (hidden.costs[0].forward, hidden.costs[0].backward) == pytest.approx((1e-3, 2e-3))
    _, slow = split_tensors(LAYERS, 4, LinkSpeed(1e4, 0.0), overlapped)
    # Half an all-reduce of 128 bytes over 4 ranks takes longer than the forward.
    assert slow.costs[0].forward == pytest.approx(0.5 * 2 * 3 / 4 * 128 / 1e4)


def test_replicas_that_shard_the_optimizer_fit_where_others_do_not():
    adam = replace(QUICK, training=TrainingState("adamw"))
    pool = DevicePool(8, memory=13_000)
    chosen = searched(pool, adam).search.layouts[0]
    sharded = searched(pool, replace(adam, shard_optimizer=True))
    assert (chosen.replicas, sharded.search.layouts[0].replicas) == (4, 8)
    assert sharded.training.optimizer_shards == 8
    assert "with the state of adamw sharded over 8 replicas" in sharded.describe()
    with pytest.raises(FitError, match="shard_optimizer=True"):
        searched(DevicePool(8, memory=100), adam)


def test_interleaved_stages_are_even():
    # The sums of four ranks are no better with even stages than with 1 and 3 layers on a rank; the order needs them.
    layers = measured([1e-3] * 16 + [0.7e-3])
    layout = DeviceLayout(1, 4, 1, 1, 32, stages_per_rank=2, schedule="interleaved")
    predicted = DeviceSearch({1: layers}, QUICK, DevicePool(4), 32).simulated(layout)
    busiest = 32 * 3 * 4.7e-3
    assert predicted.makespan < 1.1 * busiest


def test_the_utilization_counts_the_flops_of_the_model_on_all_devices():
    costs = tuple(replace(cost, flops=1e6) for cost in LAYERS.profile.costs)
    counted = Measured(LAYERS.graph, replace(LAYERS.profile, costs=costs))
    plan = DeviceSearch({1: counted}, QUICK, DevicePool(8, peak_flops=1e10), 16).best()
    chosen = plan.search.layouts[0]
    assert chosen.mfu == pytest.approx(3 * 8e6 * 16 / (8 * 1e10 * chosen.makespan))
    assert "MFU" in plan.describe()


def test_a_plan_shows_the_best_layout_of_every_division():
    plan = searched()
    halves = [each for each in plan.search.layouts if each.replicas == 4]
    assert len(halves) > 1
    shown = plan.describe()
    assert shown.count("4 x 2 x 1") == 1
    assert halves[0].lost in shown


def test_the_layouts_are_saved_with_the_plan():
    plan = searched()
    assert from_json(to_json(plan)).search.layouts == plan.search.layouts
