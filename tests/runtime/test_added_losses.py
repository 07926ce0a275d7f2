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
from tests.parity import PIPELINES, Execution, Values, WholeModel, accumulate, assert_close, gradients, split, values
from tests.plans import quick_plan, shared_recordings
from tests.selection import some
from tests.small_models import WIDTH, Block, noise, restored, seeded

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


def whole_values(where: str) -> Values:
    return accumulate(WholeModel(seeded(Adding(where)), mse_loss), X, target=TARGET)


@shared_recordings()
def split_values(where: str, schedules: list[str], execution: str) -> list[Values]:
    found = []
    for schedule, model in zip(schedules, restored(seeded(Adding(where))), strict=False):
        plan = quick_plan(model, (X,), ranks=2, microbatches=3, schedule=schedule)
        found.append(accumulate(split(execution, model, plan, mse_loss), X, target=TARGET))
    return found


@pytest.mark.parametrize("execution", PIPELINES, indirect=True)
@pytest.mark.parametrize("where", PLACES)
def test_added_losses_count_as_in_the_whole_model(execution: Execution, where: str, is_whole: bool) -> None:
    schedules = list(SCHEDULES)[PLACES.index(where) :: len(PLACES) * (1 if execution.name == "local" else 2)]
    if is_whole:
        schedules = list(SCHEDULES) if execution.name == "local" else ["1f1b", "zbv"]
    expected = whole_values(where)
    for found in execution.run(split_values, 2, where, schedules):
        assert_close(found, expected)


def test_added_losses_count_in_an_evaluation_too() -> None:
    model = seeded(Adding("in blocks"))
    plan = quick_plan(model, (X,), ranks=2, microbatches=3, schedule="1f1b")
    found = penstock.Pipeline(model, plan, loss_fn=mse_loss, local=True).eval(X, target=TARGET).loss
    with penstock.added_losses() as added, torch.no_grad():
        expected = mse_loss(model(X), TARGET) + torch.stack(added).sum()
    assert_close({"loss": found}, {"loss": expected})


def test_a_penalty_of_parameters_counts_once_where_it_is_the_only_loss_that_a_stage_adds() -> None:
    model = seeded(Adding("of weights"))
    plan = quick_plan(model, (X,), ranks=3, microbatches=3, schedule="interleaved", stages_per_rank=3)
    found = penstock.Pipeline(model, plan, loss_fn=mse_loss, local=True).step(X, target=TARGET).loss
    assert_close(values(model, [found]), whole_values("of weights"))


def test_outside_of_a_pipeline_nothing_is_added() -> None:
    model = seeded(Adding("in blocks, between blocks, and of weights"))
    assert torch.equal(model(X), seeded(Adding("in blocks, between blocks, and of weights"))(X))
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
EXACT: dict[str, Callable[[Any, Tensor], None]] = {
    "a mean": lambda block, x: ADD(0.1 * x.square().mean()),
    "a sum": lambda block, x: ADD(0.1 * x.square().sum()),
    "a sum by its argument": lambda block, x: ADD(torch.einsum("bi,bi->", x, x), reduction="sum"),
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
WARNED: dict[str, Callable[[Any, Tensor], None]] = {
    "a mean and a sum in one": lambda block, x: ADD(x.square().sum() + x.abs().mean()),
    "a load of experts": lambda block, x: ADD(x.softmax(-1).mean(0).square().sum()),
    "a load by counts": lambda block, x: ADD((x.softmax(-1).mean(0) * (x > 0).double().mean(0)).sum()),
    "a root": lambda block, x: ADD(x.square().mean().sqrt()),
    "chosen rows": lambda block, x: ADD(x[x[:, 0] > 0].square().mean()),
}


def added_step(make: Any, schedule: str, recompute: str = "none", rows: int = 7) -> tuple[Values, list[str]]:
    """The losses of a step and of an evaluation with all gradients, and the warnings."""
    model = seeded(Branching(make))
    plan = quick_plan(model, (X[:rows],), ranks=2, microbatches=3, schedule=schedule, recompute=recompute)
    pipe = penstock.Pipeline(model, plan, loss_fn=of_chain, local=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = [pipe.step(X[:rows], target=TARGET[:rows]).loss, pipe.eval(X[:rows], target=TARGET[:rows]).loss]
    return gradients(model, losses), [str(warning.message) for warning in caught]


def whole_step(make: Any, rows: int = 7) -> Values:
    """The same of the whole model, whose evaluation has the loss of its step."""
    model = seeded(Branching(make))
    loss = WholeModel(model, of_chain).step(X[:rows], target=TARGET[:rows]).loss
    return gradients(model, [loss, loss])


# Like a mean or a sum, or in the next test but one.
ALIKE = {"squares", "a mean of sums", "a sum of means", "a sum over ten"}


@pytest.mark.parametrize(("schedule", "recompute"), [("1f1b", "none"), ("zbv", "full")])
@pytest.mark.parametrize("name", some(EXACT.keys() - ALIKE, EXACT))
def test_an_added_loss_is_weighted_by_its_reduction_over_samples(name: str, schedule: str, recompute: str) -> None:
    """One of the blocks that add is in a branch that leads to no loss."""
    found, warned = added_step(EXACT[name], schedule, recompute)
    assert warned == []
    assert_close(found, whole_step(EXACT[name]))


@pytest.mark.parametrize("name", WARNED)
def test_an_added_loss_that_cannot_be_weighted_is_warned_of(name: str) -> None:
    assert any("a loss added by add_loss in stage" in text for text in added_step(WARNED[name], "1f1b")[1])


@pytest.mark.parametrize("name", ["a sum over samples", "a sum over ten"])
def test_a_sum_over_samples_and_a_sum_over_a_constant_differ_for_equal_microbatches(name: str) -> None:
    found, warned = added_step(EXACT[name], "1f1b", rows=6)
    assert warned == []
    assert_close(found, whole_step(EXACT[name], 6))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((1.0,), r"must be one number in a tensor \(got: float\)"),
        ((torch.ones(2),), r"got: torch.float32\[2\]"),
        ((torch.tensor(1),), r"got: torch.int64\[\]"),
        ((torch.ones(()), "average"), 'reduction of an added loss must be "mean", "sum" or None .got: \'average\''),
    ],
)
def test_an_added_loss_must_be_a_scalar_float_tensor_with_a_known_reduction(given: tuple[Any, ...], words: str) -> None:
    with pytest.raises(penstock.RunError, match=words):
        penstock.add_loss(*given)


class Sometimes(Block):
    """A block that adds a second loss for some samples only."""

    def forward(self, x: Tensor) -> Tensor:
        """One layer, a penalty, and another one if the first entry is above 0."""
        is_positive = float(x[0, 0]) > 0
        x = super().forward(x)
        penstock.add_loss(x.square().mean())
        if is_positive:
            penstock.add_loss(x.abs().mean(), reduction="mean")
        return x


def test_a_block_may_add_another_number_of_losses_for_every_microbatch() -> None:
    x = X[:6].clone()
    x[:, 0] = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0, 1.0])
    model = seeded(nn.Sequential(Sometimes(), Block()))
    plan = quick_plan(model, (x,), ranks=2, microbatches=3, schedule="gpipe")
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, local=True)
    with warnings.catch_warnings(record=True):
        found = pipe.step(x, target=TARGET[:6]).loss
    expected = torch.zeros(())
    for rows in (slice(0, 2), slice(2, 4), slice(4, 6)):
        with penstock.added_losses() as added, torch.no_grad():
            loss = mse_loss(model(x[rows]), TARGET[:6][rows])
        expected = expected + (loss + sum(added)) / 3
    torch.testing.assert_close(found, expected.to(found))


class Selecting(nn.Module):
    """Adds a loss of some outputs of a layer."""

    def __init__(self, select: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.select = nn.Linear(WIDTH, WIDTH), select

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        x = self.linear(x)
        penstock.add_loss(self.select(x))
        return x


def mean_of_positive(x: Tensor) -> Tensor:
    chosen = x[:, 0] > 0
    return x[chosen].square().mean() if chosen.any() else x.sum() * 0


def sum_above(x: Tensor, limit: float) -> Tensor:
    return (x.abs() - limit).relu().sum()


def selecting_step(select: Callable[[Tensor], Tensor], scale: float = 1.0) -> list[str]:
    """The warnings of a step."""
    model = seeded(nn.Sequential(nn.Linear(WIDTH, WIDTH), Selecting(select), nn.Linear(WIDTH, WIDTH)))
    with torch.no_grad():
        model[1].linear.bias[0] = -1.0
    pipe = penstock.Pipeline(
        model, quick_plan(model, (X,), ranks=2, microbatches=3, schedule="1f1b"), loss_fn=mse_loss, local=True
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe.step(X * scale, target=TARGET)
    return [str(warning.message) for warning in caught if issubclass(warning.category, penstock.PenstockWarning)]


@pytest.mark.parametrize(
    ("select", "scale", "is_warned"),
    [
        (mean_of_positive, 1.0, True),
        (lambda x: sum_above(x, 1.0), 1.0, False),
        (lambda x: sum_above(x, 50.0), 1.0, False),
        (lambda x: sum_above(x, 50.0), 1e3, True),
    ],
    ids=["a mean of some", "a sum of some", "zero", "zero before this batch"],
)
def test_added_losses_that_few_samples_have_are_identified_or_warned_about(
    select: Callable[[Tensor], Tensor], scale: float, is_warned: bool
) -> None:
    found = selecting_step(select, scale)
    assert any("could not be identified as a mean or a sum" in text for text in found) == is_warned
