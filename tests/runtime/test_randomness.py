"""Random numbers depend on step, microbatch and block, not on who runs them: any plan drops the same."""

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import mse_loss

import penstock
from penstock.schedules import SCHEDULES
from tests.runtime.models import WIDTH, Block, fixed, noise
from tests.runtime.oracle import Numbers, assert_equal, numbers
from tests.runtime.plans import quick_plan
from tests.runtime.workers import Pools

X, TARGET = noise(6, WIDTH), noise(6, WIDTH, seed=1)


class Dropping(nn.Module):
    """Dropout inside blocks and between them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(Block(), nn.Dropout(0.3)) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        """Blocks in a row, with noise between two of them."""
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number % 3 == 1:
                x = functional.dropout(x, 0.2, self.training) + 0.01 * torch.rand_like(x)
        return x


def dropped(
    schedule: str, ranks: int, depth: int | None = None, recompute: str = "none", local: bool = True
) -> Numbers:
    """After two steps; the user's own numbers are drawn in between, and differ from run to run."""
    model = fixed(Dropping())
    sizes = {"ranks": ranks, "microbatches": 3, "stages_per_rank": depth}
    plan = quick_plan(model, (X,), schedule=schedule, recompute=recompute, **sizes)
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, local=local)
    losses = []
    for _ in range(2):
        losses.append(pipe.step(X, target=TARGET).loss)
        torch.rand(ranks)
    return numbers(pipe, losses)


@cache
def expected() -> Numbers:
    """One stage on one rank."""
    return dropped("gpipe", 1)


def test_steps_and_microbatches_draw_other_numbers() -> None:
    assert expected()["loss 0"] != expected()["loss 1"]
    model = fixed(Dropping())
    plan = quick_plan(model, (X,), ranks=1, microbatches=3, schedule="gpipe")
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, local=True)
    same = X[:2].repeat(3, 1)
    assert len({float(loss) for loss in pipe.step(same, target=same).losses}) == 3


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_schedule_drops_the_same(schedule: str, ranks: int) -> None:
    assert_equal(dropped(schedule, ranks), expected())


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "interleaved"])
def test_recomputation_drops_the_same_again(schedule: str) -> None:
    assert_equal(dropped(schedule, 2, recompute="full"), expected())


def test_another_seed_drops_others() -> None:
    model = fixed(Dropping())
    plan = quick_plan(model, (X,), ranks=1, microbatches=3, schedule="gpipe")
    options = penstock.RunOptions(seed=1)
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, local=True, options=options)
    assert pipe.step(X, target=TARGET).loss != expected()["loss 0"]


def dropped_on_processes(ranks: int) -> list[Numbers]:
    return [dropped(schedule, ranks, local=False) for schedule in ("1f1b", "zbv")]


@pytest.mark.gloo
@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_drop_the_same(pools: Pools, ranks: int) -> None:
    for parts in zip(*pools[ranks].run(dropped_on_processes, ranks), strict=True):
        assert_equal({name: value for part in parts for name, value in part.items()}, expected())
