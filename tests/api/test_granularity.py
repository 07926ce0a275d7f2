"""`depth` and `basic_blocks` mean the same wherever a model is captured."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import CaptureError, PartitionError, RunError
from penstock.ir import Graph
from tests.plans import quick_plan
from tests.small_models import noise, seeded

WIDTH = 4
X = torch.cat([9 * noise(4, WIDTH), -9 * noise(4, WIDTH)])


class Router(nn.Module):
    """Decides by an activation which of its layers runs."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.one, self.other = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) if self.gate(x).sum() > 0 else self.other(x)


class Routed(nn.Module):
    """Blocks around a router."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.router = nn.Linear(WIDTH, WIDTH), Router()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.router(self.first(x))
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def planned(**options: Any) -> Graph:
    return quick_plan(seeded(Routed()), (X,), ranks=2, microbatches=2, schedule="1f1b", **options).graph


def captured(**options: Any) -> Graph:
    return penstock.capture(seeded(Routed()), (X,), **options).graph


def piped(**options: Any) -> Graph:
    speed = penstock.DeviceSpeed(1e9, 1e9)
    return penstock.pipe_model(seeded(Routed()), (X,), ranks=2, speed=speed, **options).graph


@pytest.mark.parametrize("make", [captured, planned, piped])
def test_every_function_that_captures_takes_both(make: Callable[..., Graph]) -> None:
    def names(**options: Any) -> list[str]:
        return [node.name for node in make(**options).nodes]

    assert {"router.gate", "blocks.0"} <= set(names())
    assert {"first", "router", "blocks.2"} <= set(names(basic_blocks=[Router]))
    assert {"first/linear", "router.gate/linear", "blocks.0.1/tanh"} <= set(names(depth=9))
    assert {"router", "blocks.0.1/tanh"} <= set(names(depth=9, basic_blocks=["router"]))
    with pytest.raises(CaptureError, match="depth must be 1 or more"):
        make(depth=0)
    with pytest.raises(CaptureError, match="must be a list of module names and classes"):
        make(basic_blocks="router")


def plan_of(model: nn.Module, partitioner: list[list[str]], x: Tensor) -> penstock.Plan:
    return quick_plan(model, (x,), ranks=2, microbatches=1, schedule="1f1b", partitioner=partitioner)


def test_a_pipeline_keeps_a_module_whole_that_its_plan_opened() -> None:
    model = seeded(Routed())
    plan = plan_of(model, [["first", "router"], ["blocks"]], X[:4])
    opened = penstock.Pipeline(model, plan, local=True)
    opened.step(X[:4])
    with pytest.raises(RunError, match=r"data-dependent control flow(.*\n)+.*basic_blocks"):
        opened.step(X[4:])
    pipe = penstock.Pipeline(model, plan, local=True, basic_blocks=[Router])
    for batch in (X[:4], X[4:]):
        torch.testing.assert_close(pipe.step(batch).loss, model(batch).detach())
        assert penstock.check(model, plan, (batch,), basic_blocks=["router"]).ok


def test_a_module_that_a_plan_has_cut_cannot_be_kept_whole() -> None:
    model = seeded(Routed())
    plan = plan_of(model, [["first", "router.gate"], ["router.one", "blocks"]], X)
    with pytest.raises(PartitionError, match=r"already run .*node: router, .*\n.*same basic_blocks"):
        penstock.Pipeline(model, plan, local=True, basic_blocks=["router"]).step(X)


@pytest.mark.parametrize("depth", [1, 2, 9])
def test_a_plan_of_any_depth_trains_and_evaluates(depth: int) -> None:
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0), nn.Tanh())
    model = seeded(nn.Sequential(block, nn.Linear(WIDTH, WIDTH)))
    plan = quick_plan(model, (X,), ranks=2, microbatches=3, schedule="1f1b", depth=depth)
    pipe = penstock.Pipeline(model, plan, local=True, loss_fn=nn.functional.mse_loss)
    pipe.step(X, target=X)
    torch.testing.assert_close(pipe.eval(X, return_outputs=True).outputs, model.eval()(X))
