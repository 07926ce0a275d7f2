"""Actions in torch's profiler and in the log, losses that a list is filled with, and the options of a run."""

import logging
import unittest
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock
from tests.plans import quick_plan
from tests.process_pool import Pools
from tests.small_models import WIDTH, Block, noise, seeded

X, Y = noise(6, WIDTH), noise(6, WIDTH, seed=1)
PASSES = {f"{stage}{kind}{microbatch}" for stage in (0, 1) for kind in "FB" for microbatch in range(3)}


def pipe_of(model: nn.Module | None = None, local: bool = True) -> Any:
    model = model or seeded(nn.Sequential(Block(), Block()))
    plan = quick_plan(model, (X,), ranks=2, microbatches=3, schedule="1f1b")
    return penstock.Pipeline(model, plan, loss_fn=mse_loss, local=local)


def ranges_of(pipe: Any) -> set[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        pipe.step(X, target=Y)
    return {event.name.removeprefix("PP:") for event in profiler.events() if event.name.startswith("PP:")}


def test_the_profiler_shows_a_range_for_every_action() -> None:
    pipe = pipe_of()
    plain = pipe.step(X, target=Y).loss
    names = ranges_of(pipe)
    assert names >= PASSES
    assert "0SEND_F0" in names
    assert torch.equal(pipe.step(X, target=Y).loss, plain)


def profiled_rank() -> set[str]:
    return ranges_of(pipe_of(local=False))


@pytest.mark.gloo
def test_a_rank_shows_its_own_actions(pools: Pools) -> None:
    for rank, names in enumerate(pools[2].run(profiled_rank)):
        assert names & PASSES == {name for name in PASSES if name.startswith(str(rank))}


def test_the_log_has_compiled_steps_and_actions() -> None:
    pipe = pipe_of()
    with unittest.TestCase().assertLogs("penstock", logging.INFO) as logs:
        pipe.step(X, target=Y)
    assert [record.getMessage() for record in logs.records if "compiled train on 3" in record.getMessage()]
    assert not [record for record in logs.records if record.levelno == logging.DEBUG]
    with unittest.TestCase().assertLogs("penstock", logging.DEBUG) as logs:
        pipe.step(X, target=Y)
    assert {record.getMessage().split(": ")[1] for record in logs.records} >= PASSES


def test_a_list_of_losses_is_filled() -> None:
    pipe, losses = pipe_of(), [torch.zeros(())]
    result = pipe.step(X, target=Y, losses=losses)
    assert losses == list(result.losses)
    assert len(losses) == 3
    evaluated = pipe.eval(X, target=Y, losses=losses)
    assert losses == list(evaluated.losses)
    with pytest.raises(penstock.RunError, match="losses must be a list"):
        pipe.step(X, target=Y, losses=())


class TakingLosses(nn.Module):
    """Has a parameter with the name of the list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList((Block(), Block()))

    def forward(self, x: Tensor, losses: Tensor | None = None) -> Tensor:
        """Scaled by the argument."""
        x = self.blocks[1](self.blocks[0](x))
        return x if losses is None else x * losses


def test_a_model_with_a_parameter_losses_gets_it_by_position() -> None:
    model = seeded(TakingLosses())
    pipe = pipe_of(model)
    with pytest.raises(penstock.RunError, match="losses is ambiguous"):
        pipe.step(X, target=Y, losses=[])
    found = pipe.step(X, Y, target=Y).loss
    assert torch.allclose(found, mse_loss(model(X, Y), Y).detach())


class TakingOptions(nn.Module):
    """Has parameters with the names of options of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList((Block(), Block()))

    def forward(self, x: Tensor, return_outputs: float = 1.0, output_dims: float = 1.0, record: float = 1.0) -> Tensor:
        """Scaled by all arguments."""
        return self.blocks[1](self.blocks[0](x)) * return_outputs * output_dims * record


@pytest.mark.parametrize("name", ["return_outputs", "output_dims", "record"])
def test_an_option_that_may_be_an_argument_of_the_model_is_refused(name: str) -> None:
    model = seeded(TakingOptions())
    pipe = pipe_of(model)
    with pytest.raises(penstock.RunError, match=f"{name} is ambiguous.*\ntry: pass it to the model by position"):
        pipe.step(X, target=Y, **{name: 0.5})
    found = pipe.step(X, 0.5, 0.5, 0.5, target=Y).loss
    assert torch.allclose(found, mse_loss(model(X, 0.125), Y).detach())
    assert pipe.step(X, target=Y, record=True).trace is not None  # as in `fit`


@pytest.mark.parametrize("count", [0, 1.5, "3"])
def test_max_active_stages_must_be_a_count(count: Any) -> None:
    with pytest.raises(penstock.RunError, match="max_active_stages must be an integer of 1 or more"):
        penstock.RunOptions(max_active_stages=count)
