"""Every schedule, in every size, trains with the numbers of plain PyTorch: inside one process and on several."""

from functools import cache

import pytest
from torch.nn.functional import mse_loss

import penstock
from penstock.ir import Plan
from penstock.schedules import SCHEDULES
from tests.runtime.oracle import Numbers, assert_equal, assert_identical, loop, numbers, trained, whole
from tests.runtime.plans import BATCHES, SIZES, chain_plan, fresh_chain, goes_in_order, recorded_once
from tests.runtime.workers import Pools
from tests.selection import covering

# Name, ranks, stages per rank, microbatches.
LOCAL = [(*size, microbatches) for size in SIZES for microbatches in range(1, 10)]
ON_PROCESSES = [
    (name, ranks, depth, microbatches)
    for name, ranks, depth in SIZES
    for microbatches in (1, 3, 4, 9)
    if ranks > 1 and ranks * depth <= 8
]
SOME_LOCAL = covering(LOCAL, together=3)
SOME_ON_PROCESSES = covering(ON_PROCESSES, together=3)


@cache
def plain_numbers(stages: int, microbatches: int | None = None) -> Numbers:
    """After three steps, on the whole batch or in a loop over microbatches."""
    model = fresh_chain(stages)
    train = whole(model, mse_loss) if microbatches is None else loop(model, mse_loss, microbatches)
    return numbers(model, trained(train, model.parameters(), BATCHES))


def pipeline_numbers(plan: Plan, local: bool = True) -> Numbers:
    """After three steps of a pipeline."""
    pipe = penstock.Pipeline(fresh_chain(plan.num_stages), plan, loss_fn=mse_loss, local=local)
    losses = trained(lambda x, target: pipe.step(x, target=target).loss, pipe.parameters(), BATCHES)
    return numbers(pipe, losses)


def assert_plain(found: Numbers, plan: Plan) -> None:
    """Equal to the whole batch, and to every bit of a loop over microbatches that goes the same way."""
    assert_equal(found, plain_numbers(plan.num_stages))
    if goes_in_order(plan):
        assert_identical(found, plain_numbers(plan.num_stages, plan.num_microbatches))


@pytest.mark.parametrize(("name", "ranks", "depth"), SIZES)
def test_a_local_pipeline_trains_like_the_whole_model(name: str, ranks: int, depth: int, is_whole: bool) -> None:
    cases = [case for case in (LOCAL if is_whole else SOME_LOCAL) if case[:3] == (name, ranks, depth)]
    assert cases
    with recorded_once():
        for case in cases:
            plan = chain_plan(*case)
            assert_plain(pipeline_numbers(plan), plan)


def numbers_on_processes(plans: list[Plan]) -> list[Numbers]:
    """What one rank holds after three steps of each plan."""
    with recorded_once():
        return [pipeline_numbers(plan, local=False) for plan in plans]


@pytest.mark.gloo
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_processes_train_like_the_whole_model(pools: Pools, name: str, ranks: int, is_whole: bool) -> None:
    cases = [case for case in (ON_PROCESSES if is_whole else SOME_ON_PROCESSES) if case[:2] == (name, ranks)]
    plans = [chain_plan(*case) for case in cases]
    assert plans
    for plan, *parts in zip(plans, *pools[ranks].run(numbers_on_processes, plans), strict=True):
        assert all(part[f"loss {step}"] == parts[0][f"loss {step}"] for part in parts for step in range(3))
        assert_plain({key: value for part in parts for key, value in part.items()}, plan)
