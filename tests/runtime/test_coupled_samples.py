"""Where samples of a batch act on each other, a step is exactly a plain loop over its microbatches, with a warning."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import mse_loss

import penstock
from tests.parity import Execution, Values, WholeModel, accumulate, assert_close, assert_identical, split
from tests.plans import quick_plan
from tests.process_pool import Pools
from tests.selection import every_third
from tests.small_models import WIDTH, Block, noise, seeded

X, TARGET = noise(7, WIDTH), noise(7, WIDTH, seed=1)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zbv")


def normalised() -> nn.Module:
    """Batch norm in every block."""
    return seeded(nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(4))))


def plain() -> nn.Module:
    """Blocks in a row."""
    return seeded(nn.Sequential(*(Block() for _ in range(4))))


def contrast(output: Tensor, target: Tensor) -> Tensor:
    """Every sample is compared with all targets."""
    return functional.cross_entropy(output @ target.T, torch.arange(len(output)))


CASES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "batch norm": (normalised, mse_loss),
    "contrastive loss": (plain, contrast),
}


def split_values(case: str, schedules: tuple[str, ...], execution: str) -> list[Values]:
    """The values after two steps."""
    build, loss_fn = CASES[case]
    found = []
    for schedule in schedules:
        model = build()
        plan = quick_plan(model, (X,), ranks=2, microbatches=2, schedule=schedule, stages_per_rank=None)
        found.append(accumulate(split(execution, model, plan, loss_fn), X, target=TARGET, steps=2))
    return found


def accumulated(case: str) -> Values:
    build, loss_fn = CASES[case]
    return accumulate(WholeModel(build(), loss_fn, microbatches=2), X, target=TARGET, steps=2)


@pytest.mark.parametrize("case", CASES)
def test_a_step_accumulates_over_its_microbatches_and_warns_once(case: str, is_whole: bool) -> None:
    for schedule in every_third(SCHEDULES, list(CASES).index(case), is_whole):
        with pytest.warns(UserWarning, match="gradients are those of a loop over the microbatches") as caught:
            (found,) = split_values(case, (schedule,), "local")
        assert len(caught) == 1
        assert_identical(found, accumulated(case))


@pytest.mark.gloo
@pytest.mark.parametrize("case", CASES)
def test_processes_accumulate_over_microbatches(pools: Pools, case: str, is_whole: bool) -> None:
    schedules = tuple(every_third(SCHEDULES, list(CASES).index(case) + 1, is_whole))
    for found in Execution("processes", pools).run(split_values, 2, case, schedules):
        assert_identical(found, accumulated(case))


def test_independent_samples_need_no_warning() -> None:
    model = plain()
    plan = quick_plan(model, (X,), ranks=2, microbatches=3, schedule="1f1b")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        penstock.Pipeline(model, plan, loss_fn=mse_loss, local=True).step(X, target=TARGET)


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_hooks_are_called_once_for_every_microbatch_from_the_first_step_on(schedule: str) -> None:
    model, called = plain(), []
    plan = quick_plan(model, (X,), ranks=2, microbatches=3, schedule=schedule, stages_per_rank=None)
    for number, block in enumerate(model):
        block.register_forward_pre_hook(lambda module, given, number=number: called.append(("before", number)))
        block.register_forward_hook(lambda module, given, result, number=number: called.append(("after", number)))
        block.register_full_backward_hook(lambda module, into, out, number=number: called.append(("back", number)))
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, local=True)
    for _ in range(2):
        called.clear()
        pipe.step(X, target=TARGET)
        assert {place: called.count(place) for place in called} == {
            (when, number): 3 for when in ("before", "after", "back") for number in range(4)
        }


def test_no_forward_is_hidden() -> None:
    model = plain()
    plan = quick_plan(model, (X,), ranks=2, microbatches=3, schedule="1f1b")
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, local=True)
    assert [float(block.seen) for block in model] == [0.0] * 4
    pipe.step(X, target=TARGET)
    pipe.eval(X, target=TARGET)
    assert_close({"seen": model[3].seen}, {"seen": torch.tensor(7.0, dtype=torch.float64)})


def test_an_evaluation_warns_that_its_loss_is_not_that_of_the_whole_batch() -> None:
    model = plain()
    plan = quick_plan(model, (X,), ranks=2, microbatches=2, schedule="1f1b")
    pipe = penstock.Pipeline(model, plan, loss_fn=contrast, local=True)
    with pytest.warns(UserWarning, match="not a weighted sum.*; the loss is the mean over the microbatches"):
        pipe.eval(X, target=TARGET)


def test_an_evaluation_does_not_warn_of_a_plain_mean() -> None:
    model = normalised()
    plan = quick_plan(model, (X,), ranks=2, microbatches=2, schedule="1f1b")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        penstock.Pipeline(model, plan, loss_fn=mse_loss, local=True).eval(X, target=TARGET)


def test_an_embedding_that_counts_the_words_of_a_microbatch_is_named() -> None:
    words = torch.tensor([0, 1, 1, 2, 1, 0, 1])
    model = seeded(nn.Sequential(nn.Embedding(3, WIDTH, scale_grad_by_freq=True), Block(), Block()))
    plan = quick_plan(model, (words,), ranks=2, microbatches=2, schedule="1f1b")
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, local=True)
    with pytest.warns(UserWarning, match="scale_grad_by_freq counts the words of each microbatch .*: 0; gradients"):
        pipe.step(words, target=TARGET)
