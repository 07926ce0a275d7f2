"""Random numbers depend on step, microbatch and block, not on who runs them: any plan drops the same."""

import random
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import mse_loss

import penstock
from penstock.schedules import SCHEDULES
from tests.parity import Execution, Values, assert_close, copied, split, values
from tests.plans import quick_plan
from tests.process_pool import Pools
from tests.selection import alternated
from tests.small_models import WIDTH, Block, noise, seeded

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


def dropped(schedule: str, ranks: int, recompute: str = "none", execution: str = "local") -> Values:
    """The values after two steps; in between the user draws random numbers too, more or fewer in every run."""
    model = seeded(Dropping())
    plan = quick_plan(model, (X,), ranks=ranks, microbatches=3, schedule=schedule, recompute=recompute)
    pipe = split(execution, model, plan, mse_loss)
    losses = []
    for _ in range(2):
        losses.append(pipe.step(X, target=TARGET).loss)
        torch.rand(ranks)
    return values(pipe, losses)


@cache
def expected() -> Values:
    """One stage on one rank."""
    return dropped("gpipe", 1)


def test_steps_and_microbatches_draw_other_numbers() -> None:
    assert expected()["loss 0"] != expected()["loss 1"]
    model = seeded(Dropping())
    plan = quick_plan(model, (X,), ranks=1, microbatches=3, schedule="gpipe")
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, local=True)
    same = X[:2].repeat(3, 1)
    assert len({float(loss) for loss in pipe.step(same, target=same).losses}) == 3


@pytest.mark.parametrize(("schedule", "ranks"), alternated(list(product(SCHEDULES, (2, 4)))))
def test_every_schedule_drops_the_same(schedule: str, ranks: int) -> None:
    assert_close(dropped(schedule, ranks), expected())


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "interleaved"])
def test_recomputation_drops_the_same_again(schedule: str) -> None:
    assert_close(dropped(schedule, 2, recompute="full"), expected())


def test_another_seed_drops_others() -> None:
    model = seeded(Dropping())
    plan = quick_plan(model, (X,), ranks=1, microbatches=3, schedule="gpipe")
    options = penstock.RunOptions(seed=1)
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, local=True, options=options)
    assert pipe.step(X, target=TARGET).loss != expected()["loss 0"]


def dropped_by_schedules(schedules: list[str], ranks: int, execution: str) -> list[Values]:
    return [dropped(schedule, ranks, execution=execution) for schedule in schedules]


@pytest.mark.gloo
@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_drop_the_same(pools: Pools, ranks: int, is_whole: bool) -> None:
    schedules = ["1f1b", "zbv"] if is_whole else ["1f1b" if ranks == 2 else "zbv"]
    for found in Execution("processes", pools).run(dropped_by_schedules, ranks, schedules, ranks):
        assert_close(found, expected())


class LayerDrop(nn.Module):
    """Leaves out blocks by random numbers of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Blocks in a row; the first and the last are always called."""
        for number, block in enumerate(self.blocks):
            if number in (0, 3) or random.random() < 0.5:
                x = block(x)
        return x


def left_out(ranks: int, execution: str) -> list[Values]:
    """The values after each of four steps, with a generator of Python that differs between the ranks."""
    model = seeded(LayerDrop())
    plan = quick_plan(model, (X,), ranks=ranks, microbatches=3, schedule="1f1b")
    pipe = split(execution, model, plan, mse_loss)
    random.seed()
    found = []
    for _ in range(4):
        model.zero_grad()
        found.append(copied(values(pipe, [pipe.step(X, target=TARGET).loss])))
    return found


@pytest.mark.gloo
def test_processes_leave_out_the_same_blocks(pools: Pools) -> None:
    expected = left_out(1, "local")
    assert len({float(step["loss 0"]) for step in expected}) > 1
    for found, step in zip(Execution("processes", pools).run(left_out, 2, 2), expected, strict=True):
        assert_close(found, step)


class Shallow(nn.Module):
    """Leaves out half of its blocks on average, any of them but the first and the last."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH).double() for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        """Blocks in a row, with a function after each."""
        for number, block in enumerate(self.blocks):
            if number in (0, 7) or not self.training or torch.rand(()) < 0.5:
                x = torch.tanh(block(x))
        return x


def test_blocks_that_the_example_left_out_may_be_called_later() -> None:
    steps = []
    for ranks, is_whole in ((1, True), (2, False), (3, False)):
        model = seeded(Shallow()).train(not is_whole)  # in eval mode the example has all blocks
        plan = quick_plan(model, (X,), ranks=ranks, microbatches=3, schedule="1f1b")
        pipe = split("local", model.train(), plan, mse_loss)
        steps.append(copied(values(pipe, [pipe.step(X, target=TARGET).loss for _ in range(8)])))
    assert_close(steps[1], steps[0])
    assert_close(steps[2], steps[0])
