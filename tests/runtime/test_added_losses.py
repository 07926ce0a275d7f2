"""A loss added inside a module counts as in one process, from whichever stage and place."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock
from penstock.schedules import SCHEDULES
from tests.runtime.models import WIDTH, Block, fixed, noise
from tests.runtime.oracle import Numbers, assert_equal, numbers
from tests.runtime.workers import Pools

X, TARGET = noise(7, WIDTH), noise(7, WIDTH, seed=1)


class Penalised(Block):
    """A block that keeps its result small."""

    def forward(self, x: Tensor) -> Tensor:
        """One layer, and a penalty."""
        x = super().forward(x)
        penstock.add_loss(0.1 * (x**2).mean())
        return x


class Adding(nn.Module):
    """Losses added in blocks, between blocks, and of a parameter alone."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.blocks = nn.ModuleList(Penalised() if "in blocks" in where else Block() for _ in range(8))
        self.blocks.append(Penalised() if "judge" in where else nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Blocks in a row."""
        early = x
        *blocks, judge = self.blocks
        for number, block in enumerate(blocks):
            x = block(x)
            early = x.sin() if number == 0 else early
            if "between" in self.where and number in (0, 3, 7):
                penstock.add_loss(torch.tanh(x).mean() * number)
            if "weights" in self.where and number in (2, 5):
                penstock.add_loss((block.linear.weight**2).sum())
        if "early" in self.where:
            penstock.add_loss(judge(early).mean())
        elif "judge" in self.where:
            judge(early)
        return x


PLACES = (
    "in blocks",
    "between blocks",
    "of weights",
    "in blocks, between blocks, and of weights",
    "of an early value, far behind",
    "in a judge whose result is not used",
)


def plain_numbers(where: str) -> Numbers:
    model = fixed(Adding(where))
    with penstock.added_losses() as added:
        loss = mse_loss(model(X), TARGET)
    total = loss + torch.stack(added).sum()
    total.backward()
    return numbers(model, [total.detach()])


def pipeline_numbers(where: str, schedules: list[str], local: bool = False) -> list[Numbers]:
    found = []
    for schedule in schedules:
        model = fixed(Adding(where))
        plan = penstock.plan(model, (X,), ranks=2, microbatches=3, schedule=schedule)
        pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, local=local)
        found.append(numbers(pipe, [pipe.step(X, target=TARGET).loss]))
    return found


@pytest.mark.parametrize("where", PLACES)
def test_added_losses_count_as_in_one_process(where: str) -> None:
    for found in pipeline_numbers(where, list(SCHEDULES), local=True):
        assert_equal(found, plain_numbers(where))


@pytest.mark.gloo
@pytest.mark.parametrize("where", PLACES)
def test_added_losses_count_on_every_process(pools: Pools, where: str) -> None:
    for first, second in zip(*pools[2].run(pipeline_numbers, where, ["1f1b", "zbv"]), strict=True):
        assert first["loss 0"] == second["loss 0"]
        assert_equal(first | second, plain_numbers(where))


def test_added_losses_count_in_an_evaluation_too() -> None:
    model = fixed(Adding("in blocks"))
    plan = penstock.plan(model, (X,), ranks=2, microbatches=3, schedule="1f1b")
    found = penstock.Pipeline(model, plan, loss_fn=mse_loss, local=True).eval(X, target=TARGET).loss
    with penstock.added_losses() as added, torch.no_grad():
        expected = mse_loss(model(X), TARGET) + torch.stack(added).sum()
    assert_equal({"loss": found}, {"loss": expected})


def test_outside_of_a_pipeline_nothing_is_added() -> None:
    model = fixed(Adding("in blocks, between blocks, and of weights"))
    assert torch.equal(model(X), fixed(Adding("in blocks, between blocks, and of weights"))(X))
    with penstock.added_losses() as added:
        model(X)
    assert len(added) == 13
