"""With recomputation the numbers stay, blocks run once more in backward, and buffers are written once."""

import pytest
from torch.nn.functional import mse_loss

import penstock
from penstock.schedules import SCHEDULES
from tests.runtime.models import WIDTH, chain, noise
from tests.runtime.oracle import Numbers, assert_equal, numbers, whole
from tests.runtime.plans import quick_plan
from tests.runtime.workers import Pools

X, TARGET = noise(7, WIDTH), noise(7, WIDTH, seed=1)


def recomputed(schedules: list[str], local: bool = False) -> list[tuple[Numbers, list[int]]]:
    """Numbers after two accumulated steps, and how often each block ran in the second."""
    found = []
    for schedule in schedules:
        model, runs = chain(8), [0] * 8
        plan = quick_plan(model, (X,), ranks=2, microbatches=3, schedule=schedule, recompute="full")
        pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, local=local)
        losses = [pipe.step(X, target=TARGET).loss]
        for number, block in enumerate(model):
            block.linear.register_forward_hook(
                lambda *_, number=number, runs=runs: runs.__setitem__(number, runs[number] + 1)
            )
        losses.append(pipe.step(X, target=TARGET).loss)
        found.append((numbers(pipe, losses), runs))
    return found


def plain_numbers() -> Numbers:
    model = chain(8)
    return numbers(model, [whole(model, mse_loss)(X, TARGET) for _ in range(2)])


def test_every_schedule_recomputes_each_block_once() -> None:
    for found, runs in recomputed(list(SCHEDULES), local=True):
        assert_equal(found, plain_numbers())
        assert runs == [2 * 3] * 8


@pytest.mark.gloo
def test_processes_recompute_too(pools: Pools) -> None:
    for (first, some), (second, others) in zip(*pools[2].run(recomputed, ["1f1b", "zb_h1", "zbv"]), strict=True):
        assert_equal(first | second, plain_numbers())
        assert [one + other for one, other in zip(some, others, strict=True)] == [2 * 3] * 8
