"""A loss added inside a module counts as in one process, from whichever stage and place."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock
from penstock.schedules import SCHEDULES
from tests.runtime.models import WIDTH, Block, anew, fixed, noise
from tests.runtime.oracle import Numbers, assert_equal, numbers
from tests.runtime.plans import quick_plan, recorded_once
from tests.runtime.workers import Pools
from tests.selection import by_turns

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


@recorded_once()
def pipeline_numbers(where: str, schedules: list[str], local: bool = False) -> list[Numbers]:
    found = []
    for schedule, model in zip(schedules, anew(fixed(Adding(where))), strict=False):
        plan = quick_plan(model, (X,), ranks=2, microbatches=3, schedule=schedule)
        pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, local=local)
        found.append(numbers(pipe, [pipe.step(X, target=TARGET).loss]))
    return found


@pytest.mark.parametrize("where", PLACES)
def test_added_losses_count_as_in_one_process(where: str, is_whole: bool) -> None:
    schedules = by_turns(SCHEDULES, PLACES.index(where), is_whole)
    expected = plain_numbers(where)
    for found in pipeline_numbers(where, schedules, local=True):
        assert_equal(found, expected)


@pytest.mark.gloo
@pytest.mark.parametrize("where", PLACES)
def test_added_losses_count_on_every_process(pools: Pools, where: str) -> None:
    for first, second in zip(*pools[2].run(pipeline_numbers, where, ["1f1b", "zbv"]), strict=True):
        assert first["loss 0"] == second["loss 0"]
        assert_equal(first | second, plain_numbers(where))


def test_added_losses_count_in_an_evaluation_too() -> None:
    model = fixed(Adding("in blocks"))
    plan = quick_plan(model, (X,), ranks=2, microbatches=3, schedule="1f1b")
    found = penstock.Pipeline(model, plan, loss_fn=mse_loss, local=True).eval(X, target=TARGET).loss
    with penstock.added_losses() as added, torch.no_grad():
        expected = mse_loss(model(X), TARGET) + torch.stack(added).sum()
    assert_equal({"loss": found}, {"loss": expected})


def test_a_penalty_of_parameters_counts_once_where_it_is_the_only_loss_that_a_stage_adds() -> None:
    model = fixed(Adding("of weights"))
    plan = quick_plan(model, (X,), ranks=3, microbatches=3, schedule="interleaved", stages_per_rank=3)
    found = penstock.Pipeline(model, plan, loss_fn=mse_loss, local=True).step(X, target=TARGET).loss
    assert_equal(numbers(model, [found]), plain_numbers("of weights"))


def test_outside_of_a_pipeline_nothing_is_added() -> None:
    model = fixed(Adding("in blocks, between blocks, and of weights"))
    assert torch.equal(model(X), fixed(Adding("in blocks, between blocks, and of weights"))(X))
    with penstock.added_losses() as added:
        model(X)
    assert len(added) == 13


class AddingBlock(Block):
    """A block that adds what a function makes of its result."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        """One layer, and what is added."""
        x = super().forward(x)
        self.make(self, x)
        return x


class Branching(nn.Module):
    """A chain, and a branch beside it that is returned and no part of the loss."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), AddingBlock(make), Block(), Block(), AddingBlock(make)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The end of the chain, and of the branch that leaves it after the first block."""
        *chain, branch = self.blocks
        first = chain[0](x)
        x = first
        for block in chain[1:]:
            x = block(x)
        return x, branch(first)


def of_chain(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return mse_loss(output[0], target)


ADD = penstock.add_loss
SEEN: dict[str, Callable[[Any, Tensor], None]] = {
    "a mean": lambda block, x: ADD(0.1 * x.square().mean()),
    "a sum": lambda block, x: ADD(0.1 * x.square().sum()),
    "a sum that is said to be one": lambda block, x: ADD(torch.einsum("bi,bi->", x, x), reduction="sum"),
    "a sum over ten": lambda block, x: ADD(x.square().sum() / 10),
    "a sum over samples": lambda block, x: ADD(x.square().sum() / len(x)),
    "a sum of means": lambda block, x: ADD(x.square().mean(1).sum()),
    "a mean of sums": lambda block, x: ADD(x.square().sum(1).mean()),
    "means of columns": lambda block, x: ADD(x.mean(0).sum()),
    "squares": lambda block, x: ADD(mse_loss(x, torch.zeros_like(x))),
    "weights": lambda block, x: ADD(block.linear.weight.square().sum()),
    "a mean and weights": lambda block, x: ADD(x.square().mean() + block.linear.weight.norm()),
    "two of two kinds": lambda block, x: (ADD(x.square().sum()), ADD(x.abs().mean())),  # type: ignore[dict-item, return-value]
}
DOUBTED: dict[str, Callable[[Any, Tensor], None]] = {
    "a mean and a sum in one": lambda block, x: ADD(x.square().sum() + x.abs().mean()),
    "a load of experts": lambda block, x: ADD(x.softmax(-1).mean(0).square().sum()),
    "a load by counts": lambda block, x: ADD((x.softmax(-1).mean(0) * (x > 0).double().mean(0)).sum()),
    "a root": lambda block, x: ADD(x.square().mean().sqrt()),
    "chosen rows": lambda block, x: ADD(x[x[:, 0] > 0].square().mean()),
}


def added_step(make: Any, schedule: str, recompute: str = "none", rows: int = 7) -> tuple[Numbers, list[str]]:
    """Losses of a step and of an evaluation and all gradients, and what is said."""
    model = fixed(Branching(make))
    plan = quick_plan(model, (X[:rows],), ranks=2, microbatches=3, schedule=schedule, recompute=recompute)
    pipe = penstock.Pipeline(model, plan, loss_fn=of_chain, local=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        losses = [pipe.step(X[:rows], target=TARGET[:rows]).loss, pipe.eval(X[:rows], target=TARGET[:rows]).loss]
    return gradients_of(model, losses), [str(one.message) for one in said]


def gradients_of(model: nn.Module, losses: list[Tensor]) -> Numbers:
    return {name: value for name, value in numbers(model, losses).items() if not name.startswith("state")}


def plain_step(make: Any, rows: int = 7) -> Numbers:
    model = fixed(Branching(make))
    with penstock.added_losses() as added:
        loss = of_chain(model(X[:rows]), TARGET[:rows])
    total = loss + torch.stack(added).sum()
    total.backward()
    return gradients_of(model, [total.detach(), total.detach()])


@pytest.mark.parametrize(("schedule", "recompute"), [("1f1b", "none"), ("zbv", "full")])
@pytest.mark.parametrize("name", SEEN)
def test_what_is_added_is_weighted_by_how_it_is_made_of_samples(name: str, schedule: str, recompute: str) -> None:
    """One of the blocks that add is in a branch that leads to no loss."""
    found, said = added_step(SEEN[name], schedule, recompute)
    assert said == []
    assert_equal(found, plain_step(SEEN[name]))


@pytest.mark.parametrize("name", DOUBTED)
def test_what_is_added_and_cannot_be_weighted_is_remarked(name: str) -> None:
    assert any("a loss added by add_loss in stage" in text for text in added_step(DOUBTED[name], "1f1b")[1])


@pytest.mark.parametrize("name", ["a sum over samples", "a sum over ten"])
def test_a_sum_divided_by_the_samples_is_told_from_one_divided_by_a_number_where_sizes_are_equal(name: str) -> None:
    found, warned = added_step(SEEN[name], "1f1b", rows=6)
    assert warned == []
    assert_equal(found, plain_step(SEEN[name], 6))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((1.0,), r"must be one number in a tensor \(given: float\)"),
        ((torch.ones(2),), r"given: torch.float32\[2\]"),
        ((torch.tensor(1),), r"given: torch.int64\[\]"),
        ((torch.ones(()), "average"), r"unknown reduction of an added loss \(reduction: 'average'\)"),
    ],
)
def test_what_is_no_loss_is_refused(given: tuple[Any, ...], words: str) -> None:
    with pytest.raises(penstock.RunError, match=words):
        penstock.add_loss(*given)
