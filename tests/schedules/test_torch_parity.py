"""Our orders are those of torch.distributed.pipelining wherever it has the schedule and accepts the sizes."""

import pytest

from penstock.ir import Program, Schedule
from penstock.passes import lower, verify
from penstock.schedules import SCHEDULES, build

torch_orders = pytest.importorskip("tests.schedules.torch_orders")
MULTI, SINGLE = torch_orders.MULTI, torch_orders.SINGLE

AS_TORCH = ("add_transfers", "hoist_receives", "add_reductions", "add_shard_moves")


def cells(orders):
    return [[str(action) for action in order if action is not None] for order in orders]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("name", SINGLE)
def test_one_stage_per_rank_runs_in_the_order_that_torch_executes(name, ranks):
    for microbatches in range(ranks, 15):  # torch's 1f1b refuses fewer microbatches than stages
        assert cells(build(name, ranks, microbatches).orders) == torch_orders.executed(name, ranks, microbatches)


@pytest.mark.untraced
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("name", MULTI)
def test_several_stages_per_rank_run_in_the_order_of_torch(name, ranks):
    num_compared = 0
    for microbatches in (*range(1, 9), 10, 12, 13, 14):
        for stages in SCHEDULES[name].allowed_stages_per_rank or (1, 2, 3):
            sizes = (name, ranks, microbatches, stages)
            if (theirs := torch_orders.stored(*sizes)) is not None:  # torch refuses some sizes
                assert cells(build(*sizes).orders) == theirs, sizes
                num_compared += 1
    assert num_compared > 0


@pytest.mark.parametrize("name", MULTI)
def test_larger_schedules_are_those_of_torch_too(name):
    sizes = (name, 8, 24, 2)
    assert cells(build(*sizes).orders) == torch_orders.stored(*sizes)


@pytest.mark.parametrize("sizes", [("interleaved", 4, 9, 2), ("interleaved_zb", 4, 9, 2), ("dualpipe_v", 4, 7, 2)])
def test_torch_refuses_sizes_that_we_allow(sizes):
    assert torch_orders.stored(*sizes) is None
    verify(build(*sizes))


def test_the_stored_1f1b_order_of_torch_differs_from_the_executed_one():
    stored, ran = cells(torch_orders.stored_1f1b(3, 4))[-1], torch_orders.executed("1f1b", 3, 4)[-1]
    assert " ".join(ran) == "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"
    assert " ".join(stored) == "2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2REDUCE_GRAD"


@pytest.mark.parametrize("sizes", [(2, 4), (4, 8), (3, 7)])
@pytest.mark.parametrize("name", MULTI)
def test_torch_reads_our_csv_of_compute(name, sizes, tmp_path):
    schedule = build(name, *sizes)
    schedule.to_csv(tmp_path / "ours.csv")
    read = torch_orders.load_csv(tmp_path / "ours.csv", schedule.num_stages, *sizes, "compute_only")
    assert cells(read.pipeline_order[rank] for rank in range(sizes[0])) == cells(schedule.orders)


@pytest.mark.parametrize("sizes", [(2, 4), (4, 8), (3, 7)])
@pytest.mark.parametrize("name", MULTI)
def test_torch_reads_our_csv_with_communication(name, sizes, tmp_path):
    program = lower(build(name, *sizes), passes=AS_TORCH)
    program.to_csv(tmp_path / "ours.csv")
    read = torch_orders.load_csv(tmp_path / "ours.csv", program.num_stages, *sizes, "compute_comms")
    assert cells(read.pipeline_order_with_comms[rank] for rank in range(sizes[0])) == cells(program.orders)


@pytest.mark.parametrize("sizes", [(2, 4), (4, 8)])
@pytest.mark.parametrize("name", MULTI)
def test_we_read_the_csv_of_torch_in_both_formats(name, sizes, tmp_path):
    theirs = torch_orders.build(name, *sizes, 2)
    theirs._dump_csv(tmp_path / "compute.csv", "compute_only")
    theirs._dump_csv(tmp_path / "all.csv", "compute_comms")
    assert Schedule.from_csv(tmp_path / "compute.csv") == build(name, *sizes)
    program = Program.from_csv(tmp_path / "all.csv")
    assert cells(program.orders) == cells(theirs.pipeline_order_with_comms[rank] for rank in range(sizes[0]))
