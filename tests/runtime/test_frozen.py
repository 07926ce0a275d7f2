"""Gradients are where plain PyTorch has them, and None exactly where it has None, under every schedule."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock
from penstock.schedules import SCHEDULES
from tests.runtime.models import WIDTH, Block, anew, fixed, noise
from tests.runtime.oracle import Numbers, assert_equal, numbers, whole
from tests.runtime.plans import quick_plan, recorded_once
from tests.runtime.workers import Pools
from tests.selection import by_turns

X, TARGET = noise(7, WIDTH), noise(7, WIDTH, seed=1)


class Adapted(nn.Module):
    """A frozen layer with a small trained one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both."""
        return torch.tanh(self.base(x)) + self.up(self.down(x))


class LossHead(nn.Module):
    """Blocks, some parameters that only touch the output, and some that nothing touches."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.unused, self.idle = nn.Parameter(torch.zeros(2)), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        """The scale is that of the output."""
        for block in self.blocks:
            x = block(x)
        return x * self.scale + self.shift


def frozen(places: Callable[[int], bool]) -> nn.Module:
    model = nn.Sequential(*(Block() for _ in range(8)))
    for place, block in enumerate(model):
        block.requires_grad_(not places(place))
    return fixed(model)


def half_frozen() -> nn.Module:
    """In every block either the weights or the biases are frozen."""
    model = nn.Sequential(*(Block() for _ in range(8)))
    for place, block in enumerate(model):
        (block.linear.weight if place % 2 else block.linear.bias).requires_grad_(False)
    return fixed(model)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "the first stage is frozen": lambda: frozen(lambda place: place < 4),
    "a stage in the middle is frozen": lambda: frozen(lambda place: place in (2, 3)),
    "the last stage is frozen": lambda: frozen(lambda place: place > 5),
    "only the last block is trained": lambda: frozen(lambda place: place < 7),
    "only the first block is trained": lambda: frozen(lambda place: place > 0),
    "weights or biases are frozen": half_frozen,
    "small layers beside frozen ones": lambda: fixed(nn.Sequential(*(Adapted() for _ in range(8)))),
    "parameters of the output, and unused ones": lambda: fixed(LossHead()),
}


@recorded_once()
def step_numbers(name: str, schedules: list[str], ranks: int, local: bool = False) -> list[Numbers]:
    """After two accumulated steps."""
    found = []
    for schedule, model in zip(schedules, anew(MODELS[name]()), strict=False):
        plan = quick_plan(model, (X,), ranks=ranks, microbatches=3, schedule=schedule)
        pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, local=local)
        losses = [pipe.step(X, target=TARGET).loss for _ in range(2)]
        found.append(numbers(pipe, losses))
    return found


def plain_numbers(name: str) -> Numbers:
    model = MODELS[name]()
    return numbers(model, [whole(model, mse_loss)(X, TARGET) for _ in range(2)])


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_where_they_belong(name: str, is_whole: bool) -> None:
    expected = plain_numbers(name)
    schedules = by_turns(SCHEDULES, list(MODELS).index(name), is_whole)
    for found in step_numbers(name, schedules, 2, local=True):
        assert_equal(found, expected)


@pytest.mark.gloo
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_on_the_rank_where_they_belong(pools: Pools, name: str, is_whole: bool) -> None:
    schedules = by_turns(("1f1b", "zb_h1", "zbv"), list(MODELS).index(name), is_whole)
    results = pools[2].run(step_numbers, name, schedules, 2)
    for parts in zip(*results, strict=True):
        assert_equal({key: value for part in parts for key, value in part.items()}, plain_numbers(name))
