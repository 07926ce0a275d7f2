"""Asynchronous pipelines have every bit of one process that replays the same versions of the weights."""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock
from penstock.planner import STALENESS
from tests.plans import quick_plan
from tests.process_pool import Pools
from tests.runtime.stale_replay import StaleReplay
from tests.small_models import WIDTH, noise, seeded

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
}


class Layer(nn.Module):
    """A layer without buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        return x + torch.tanh(self.linear(x)) ** 3


def layers(count: int) -> nn.Sequential:
    return seeded(nn.Sequential(*(Layer() for _ in range(count))))  # type: ignore[return-value]


def batches(sizes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    return [
        (noise(size, WIDTH, seed=2 * index), noise(size, WIDTH, seed=2 * index + 1)) for index, size in enumerate(sizes)
    ]


def pipeline(ranks: int, microbatches: int, staleness: str, name: str, local: bool = True, **given: Any) -> Any:
    model = given.pop("model", None) or layers(ranks)
    plan = quick_plan(model, (noise(8, WIDTH),), ranks=ranks, microbatches=microbatches, schedule="1f1b")
    given = {"loss_fn": mse_loss, "optimizer": lambda params: OPTIMIZERS[name](params), **given}
    return penstock.Pipeline(model, plan, staleness=staleness, local=local, **given)


def trained(
    ranks: int, microbatches: int, staleness: str, name: str, streams: Sequence[Sequence[int]], local: bool
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The weights of this process and all losses after some streams."""
    pipe = pipeline(ranks, microbatches, staleness, name, local)
    results = []
    for sizes in streams:
        results += [pipe.step(x, target=y) for x, y in batches(sizes)]
        pipe.drain()
    return pipe.state_dict(), [result.loss for result in results]


def replayed(
    ranks: int, microbatches: int, staleness: str, name: str, streams: Sequence[Sequence[int]]
) -> tuple[dict[str, Tensor], list[Tensor]]:
    model = layers(ranks)
    oracle = StaleReplay(list(model), OPTIMIZERS[name], mse_loss, microbatches, staleness)
    for sizes in streams:
        oracle.run(batches(sizes))
    return model.state_dict(), oracle.losses


def assert_same(found: tuple[dict[str, Tensor], list[Tensor]], expected: tuple[dict[str, Tensor], list[Tensor]]) -> None:
    assert found[0].keys() == expected[0].keys()
    different = [name for name, tensor in expected[0].items() if not torch.equal(found[0][name], tensor)]
    assert not different
    torch.testing.assert_close(torch.stack(found[1]), torch.stack(expected[1]), rtol=1e-14, atol=0.0)


CASES = [
    (ranks, microbatches, staleness, name)
    for staleness in STALENESS
    for ranks, microbatches in [(1, 1), (2, 1), (2, 3), (3, 2), (4, 1), (4, 3)]
    for name in OPTIMIZERS
    if not (staleness == "2bw" and microbatches < ranks - 1) and not (staleness == "predict" and name == "sgd")
]


@pytest.mark.parametrize(("ranks", "microbatches", "staleness", "name"), CASES)
def test_every_bit_is_that_of_the_replayed_versions(ranks: int, microbatches: int, staleness: str, name: str) -> None:
    case = (ranks, microbatches, staleness, name, [[6] * 7])
    assert_same(trained(*case, True), replayed(*case))
