"""Gradients are where plain PyTorch has them, and None exactly where it has None, under every schedule."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from penstock.schedules import SCHEDULES
from tests.parity import EXECUTIONS, Execution, Values, WholeModel, accumulate, assert_close, split
from tests.plans import quick_plan, shared_recordings
from tests.selection import every_third
from tests.small_models import WIDTH, Block, noise, restored, seeded

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
    return seeded(model)


def half_frozen() -> nn.Module:
    """In every block either the weights or the biases are frozen."""
    model = nn.Sequential(*(Block() for _ in range(8)))
    for place, block in enumerate(model):
        (block.linear.weight if place % 2 else block.linear.bias).requires_grad_(False)
    return seeded(model)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "the first stage is frozen": lambda: frozen(lambda place: place < 4),
    "a stage in the middle is frozen": lambda: frozen(lambda place: place in (2, 3)),
    "the last stage is frozen": lambda: frozen(lambda place: place > 5),
    "only the last block is trained": lambda: frozen(lambda place: place < 7),
    "only the first block is trained": lambda: frozen(lambda place: place > 0),
    "weights or biases are frozen": half_frozen,
    "small layers beside frozen ones": lambda: seeded(nn.Sequential(*(Adapted() for _ in range(8)))),
    "parameters of the output, and unused ones": lambda: seeded(LossHead()),
}


@shared_recordings()
def split_values(name: str, schedules: list[str], execution: str) -> list[Values]:
    """The values after two accumulated steps."""
    found = []
    for schedule, model in zip(schedules, restored(MODELS[name]()), strict=False):
        plan = quick_plan(model, (X,), ranks=2, microbatches=3, schedule=schedule)
        found.append(accumulate(split(execution, model, plan, mse_loss), X, target=TARGET, steps=2))
    return found


# Stages differ only by the kind of backward, and processes are started for few schedules.
SCHEDULES_OF = {"stages": ("1f1b", "zb_h1"), "local": tuple(SCHEDULES), "processes": ("1f1b", "zb_h1", "zbv")}


@pytest.mark.parametrize("execution", EXECUTIONS, indirect=True)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_exist_exactly_where_plain_pytorch_has_them(execution: Execution, name: str, is_whole: bool) -> None:
    expected = accumulate(WholeModel(MODELS[name](), mse_loss), X, target=TARGET, steps=2)
    schedules = every_third(SCHEDULES_OF[execution.name], list(MODELS).index(name) // 3, is_whole)
    for found in execution.run(split_values, 2, name, schedules):
        assert_close(found, expected)
