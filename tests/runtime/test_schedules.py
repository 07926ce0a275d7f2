"""Every schedule, in every size, trains with the numbers of plain PyTorch: inside one process and on several."""

from functools import cache

import pytest
from torch.nn.functional import mse_loss

import penstock
from penstock.schedules import SCHEDULES
from tests.runtime.oracle import Numbers, assert_equal, assert_identical, loop, numbers, trained, whole
from tests.runtime.plans import BATCHES, DEPTHS, SIZES, chain_plan, fresh_chain, goes_in_order, recorded_once
from tests.runtime.workers import Pools

MICROBATCHES = range(1, 10)
SOME_MICROBATCHES = (1, 3, 4, 9)


@cache
def plain_numbers(stages: int, microbatches: int | None = None) -> Numbers:
    """After three steps, on the whole batch or in a loop over microbatches."""
    model = fresh_chain(stages)
    train = whole(model, mse_loss) if microbatches is None else loop(model, mse_loss, microbatches)
    return numbers(model, trained(train, model.parameters(), BATCHES))


def pipeline_numbers(name: str, ranks: int, depth: int, microbatches: int, local: bool = True) -> Numbers:
    """After three steps of a pipeline."""
    plan, model = chain_plan(name, ranks, depth, microbatches), fresh_chain(ranks * depth)
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, local=local)
    losses = trained(lambda x, target: pipe.step(x, target=target).loss, pipe.parameters(), BATCHES)
    return numbers(pipe, losses)


@pytest.mark.parametrize(("name", "ranks", "depth"), SIZES)
def test_a_local_pipeline_trains_like_the_whole_model(name: str, ranks: int, depth: int) -> None:
    with recorded_once():
        for microbatches in MICROBATCHES:
            found = pipeline_numbers(name, ranks, depth, microbatches)
            assert_equal(found, plain_numbers(ranks * depth))
            if goes_in_order(chain_plan(name, ranks, depth, microbatches)):
                assert_identical(found, plain_numbers(ranks * depth, microbatches))


def numbers_on_processes(ranks: int, cases: list[tuple[str, int, int]]) -> list[Numbers]:
    """What one rank holds after three steps, for every case."""
    with recorded_once():
        return [pipeline_numbers(name, ranks, depth, count, local=False) for name, depth, count in cases]


@pytest.mark.gloo
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_processes_train_like_the_whole_model(pools: Pools, name: str, ranks: int) -> None:
    depths = [depth for depth in DEPTHS[name] if ranks * depth <= 8]
    cases = [(name, depth, count) for depth in depths for count in SOME_MICROBATCHES]
    results = pools[ranks].run(numbers_on_processes, ranks, cases)
    for (_, depth, count), *parts in zip(cases, *results, strict=True):
        losses = [{key: part[key] for key in part if key.startswith("loss")} for part in parts]
        assert all(part == losses[0] for part in losses)
        found = {key: value for part in parts for key, value in part.items()}
        assert_equal(found, plain_numbers(ranks * depth))
        if goes_in_order(chain_plan(name, ranks, depth, count)):
            assert_identical(found, plain_numbers(ranks * depth, count))
