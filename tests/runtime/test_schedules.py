"""Every schedule, in every size, trains like the whole model: as stages, in a local pipeline and on processes."""

from functools import cache

import pytest
from torch.nn.functional import mse_loss

from penstock.ir import Plan
from penstock.schedules import SCHEDULES
from tests.parity import TRANSPORTS, Execution, Values, WholeModel, assert_close, assert_identical, split, train
from tests.plans import BATCHES, SIZES, accumulates_in_order, chain_plan, fresh_chain, shared_recordings
from tests.process_pool import Pools
from tests.selection import covering, some

# Name, ranks, stages per rank, microbatches.
LOCAL = [(*size, microbatches) for size in SIZES for microbatches in range(1, 10)]
ON_PROCESSES = [
    (name, ranks, depth, microbatches)
    for name, ranks, depth in SIZES
    for microbatches in (1, 3, 4, 9)
    if ranks > 1 and ranks * depth <= 8
]
SOME_SIZES = SIZES[1::2]
SOME_LOCAL = covering([case for case in LOCAL if case[:3] in SOME_SIZES], together=3)
SOME_ON_PROCESSES = covering(ON_PROCESSES, together=3)


@cache
def whole_values(stages: int, microbatches: int | None = None) -> Values:
    """The values after three steps, on the whole batch or accumulating over microbatches."""
    return train(WholeModel(fresh_chain(stages), mse_loss, microbatches), BATCHES)


def split_values(plans: list[Plan], execution: str) -> list[Values]:
    """The values after three steps of each plan."""
    with shared_recordings():
        return [train(split(execution, fresh_chain(plan.num_stages), plan, mse_loss), BATCHES) for plan in plans]


def assert_trained_like_the_whole_model(found: Values, plan: Plan) -> None:
    """Close to steps on the whole batch, and identical to accumulation over microbatches in the same order."""
    assert_close(found, whole_values(plan.num_stages))
    if accumulates_in_order(plan):
        assert_identical(found, whole_values(plan.num_stages, plan.num_microbatches))


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("stages", range(1, 13))
def test_stages_train_like_the_whole_model(stages: int, is_split: bool) -> None:
    plan = chain_plan("zb_h1" if is_split else "1f1b", stages, 1, 1)
    (found,) = split_values([plan], "stages")
    assert_identical(found, whole_values(stages))


@pytest.mark.parametrize("size", some(SOME_SIZES, SIZES))
def test_a_local_pipeline_trains_like_the_whole_model(size: tuple[str, int, int], is_whole: bool) -> None:
    cases = [case for case in (LOCAL if is_whole else SOME_LOCAL) if case[:3] == size]
    assert cases
    plans = [chain_plan(*case) for case in cases]
    for plan, found in zip(plans, split_values(plans, "local"), strict=True):
        assert_trained_like_the_whole_model(found, plan)


@pytest.mark.gloo
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_processes_train_like_the_whole_model(pools: Pools, name: str, ranks: int, is_whole: bool) -> None:
    cases = [case for case in (ON_PROCESSES if is_whole else SOME_ON_PROCESSES) if case[:2] == (name, ranks)]
    plans = [chain_plan(*case) for case in cases]
    assert plans
    for index, transport in enumerate(TRANSPORTS):
        # All cases over all transports, or each case over one of them.
        chosen = plans if is_whole else plans[index :: len(TRANSPORTS)]
        for plan, found in zip(chosen, Execution(transport, pools).run(split_values, ranks, chosen), strict=True):
            assert_trained_like_the_whole_model(found, plan)
