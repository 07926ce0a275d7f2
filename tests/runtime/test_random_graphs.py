"""Random graphs of blocks, under random schedules and sizes, train like the whole model."""

from random import Random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, mse_loss

from penstock.ir import Plan
from penstock.schedules import SCHEDULES
from tests.parity import Execution, Values, WholeModel, accumulate, assert_close, split
from tests.plans import quick_plan
from tests.process_pool import Pools
from tests.selection import some
from tests.small_models import WIDTH, Block, noise, seeded

BLOCKS = 12
TOLERANCE = 1e-11


class Woven(nn.Module):
    """Every block may read values of earlier ones in several ways; some are frozen, some lead nowhere."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.shared = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        self.reads = [
            [(random.randrange(-1, place), random.choice("++*i~")) for _ in range(random.randint(0, 2))]
            for place in range(BLOCKS)
        ]
        self.uses_shared = [random.random() < 0.25 for _ in range(BLOCKS)]
        self.is_dead_end = [random.random() < 0.1 for _ in range(BLOCKS)]
        for block in self.blocks:
            block.requires_grad_(random.random() > 0.2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Sums, products without gradient, whole numbers as indices, and the mask anywhere."""
        made = {-1: x}
        for place, block in enumerate(self.blocks):
            h = x
            for source, way in self.reads[place]:
                h = _read(h, made[source], way, mask)
            if self.uses_shared[place]:
                h = torch.tanh(linear(h, self.shared))
            made[place] = block(h)
            x = x if self.is_dead_end[place] else made[place]
        return x


def _read(h: Tensor, value: Tensor, way: str, mask: Tensor) -> Tensor:
    if way == "+":
        return h + value
    if way == "*":
        return h * value.detach()
    return h.gather(-1, value.argsort(-1)) if way == "i" else torch.relu_(h + value * mask)


class Case(NamedTuple):
    """One model with its batch and plan, all from a seed."""

    model: nn.Module
    inputs: tuple[Tensor, Tensor]
    target: Tensor
    choices: dict[str, object]


def case(seed: int, ranks: int) -> Case:
    random = Random(seed)
    rows, microbatches, schedule = random.randint(1, 9), random.randint(1, 5), random.choice(list(SCHEDULES))
    inputs = noise(rows, WIDTH, seed=seed), noise(rows, 1, seed=seed + 1).abs()
    recompute = random.choice(("none", "full"))
    choices = {"ranks": ranks, "microbatches": microbatches, "schedule": schedule, "recompute": recompute}
    choices["partitioner"] = random.choice(("uniform", "linear", "acyclic"))
    return Case(seeded(Woven(random), seed), inputs, noise(rows, WIDTH, seed=seed + 2), choices)


def planned(seed: int, ranks: int) -> Plan:
    """The plan of a case."""
    model, inputs, _, choices = case(seed, ranks)
    return quick_plan(model, inputs, **choices)


def split_values(plans: dict[int, Plan], execution: str) -> list[Values]:
    """The values after two accumulated steps of every seed."""
    found = []
    for seed, plan in plans.items():
        model, inputs, target, _ = case(seed, plan.num_ranks)
        found.append(accumulate(split(execution, model, plan, mse_loss), *inputs, target=target, steps=2))
    return found


def whole_values(seed: int, ranks: int) -> Values:
    model, inputs, target, _ = case(seed, ranks)
    return accumulate(WholeModel(model, mse_loss), *inputs, target=target, steps=2)


@pytest.mark.parametrize("seed", some(range(4), range(20)))
def test_a_random_graph_trains_like_the_whole_model_in_one_process(seed: int) -> None:
    ranks = 2 + seed % 3
    plans = {seed: planned(seed, ranks)}
    for execution in ("stages", "local"):
        (found,) = split_values(plans, execution)
        assert_close(found, whole_values(seed, ranks), TOLERANCE)


@pytest.mark.gloo
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_random_graphs_train_like_the_whole_model_on_processes(pools: Pools, ranks: int, is_whole: bool) -> None:
    seeds = range(100, 104) if is_whole else [100 + ranks]
    plans = {seed: planned(seed, ranks) for seed in seeds}
    for seed, found in zip(plans, Execution("processes", pools).run(split_values, ranks, plans), strict=True):
        assert_close(found, whole_values(seed, ranks), TOLERANCE)
