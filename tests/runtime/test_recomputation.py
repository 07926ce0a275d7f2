"""Recomputation runs every block once more in backward and changes no value."""

import pytest
from torch.nn.functional import mse_loss

from penstock.schedules import SCHEDULES
from tests.parity import Values, WholeModel, accumulate, assert_close, merged, split, values
from tests.plans import quick_plan
from tests.process_pool import Pools
from tests.small_models import WIDTH, chain, noise

X, TARGET = noise(7, WIDTH), noise(7, WIDTH, seed=1)


def recomputed(schedules: list[str], execution: str) -> list[tuple[Values, list[int]]]:
    """The values after two accumulated steps, and the number of calls of each block in the second."""
    found = []
    for schedule in schedules:
        model, runs = chain(8), [0] * 8
        plan = quick_plan(model, (X,), ranks=2, microbatches=3, schedule=schedule, recompute="full")
        pipe = split(execution, model, plan, mse_loss)
        losses = [pipe.step(X, target=TARGET).loss]
        for number, block in enumerate(model):
            block.linear.register_forward_hook(
                lambda *_, number=number, runs=runs: runs.__setitem__(number, runs[number] + 1)
            )
        losses.append(pipe.step(X, target=TARGET).loss)
        found.append((values(pipe, losses), runs))
    return found


def whole_values() -> Values:
    return accumulate(WholeModel(chain(8), mse_loss), X, target=TARGET, steps=2)


def test_every_schedule_recomputes_each_block_once() -> None:
    for found, runs in recomputed(list(SCHEDULES), "local"):
        assert_close(found, whole_values())
        assert runs == [2 * 3] * 8


@pytest.mark.gloo
def test_processes_recompute_too(pools: Pools, is_whole: bool) -> None:
    results = pools[2].run(recomputed, ["1f1b", "zb_h1", "zbv"] if is_whole else ["zbv"], "processes")
    for (first, first_runs), (second, second_runs) in zip(*results, strict=True):
        assert_close(merged([first, second]), whole_values())
        assert [sum(both) for both in zip(first_runs, second_runs, strict=True)] == [2 * 3] * 8
