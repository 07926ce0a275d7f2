"""Asynchronous pipelines have every bit of one process that replays the same versions of the weights."""

from collections.abc import Sequence
from functools import cache, partial
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
from tests.selection import covered
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


@cache
def plan_of(ranks: int, microbatches: int) -> penstock.Plan:
    batch = (noise(8, WIDTH),)
    return quick_plan(layers(ranks), batch, ranks=ranks, microbatches=microbatches, schedule="1f1b")


def pipeline(ranks: int, microbatches: int, staleness: str, name: str, local: bool = True, **given: Any) -> Any:
    model = given.pop("model", None) or layers(ranks)
    plan = plan_of(ranks, microbatches)
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


def assert_same(
    found: tuple[dict[str, Tensor], list[Tensor]], expected: tuple[dict[str, Tensor], list[Tensor]]
) -> None:
    assert found[0].keys() == expected[0].keys()
    different = [name for name, tensor in expected[0].items() if not torch.equal(found[0][name], tensor)]
    assert not different
    torch.testing.assert_close(torch.stack(found[1]), torch.stack(expected[1]), rtol=1e-14, atol=0.0)


CASES = [
    ((ranks, microbatches), staleness, name)
    for staleness in STALENESS
    for ranks, microbatches in [(1, 1), (2, 1), (2, 3), (3, 2), (4, 1), (4, 3)]
    for name in OPTIMIZERS
    if not (staleness == "2bw" and microbatches < ranks - 1) and not (staleness == "predict" and name == "sgd")
]


@pytest.mark.parametrize(("sizes", "staleness", "name"), covered(CASES))
def test_every_bit_is_that_of_the_replayed_versions(sizes: tuple[int, int], staleness: str, name: str) -> None:
    case = (*sizes, staleness, name, [[6] * 7])
    assert_same(trained(*case, True), replayed(*case))


STREAMS = [[6] * 5, [6, 6, 5], [1]]
"""an uneven last batch, and streams that begin after a drain"""


@pytest.mark.parametrize("staleness", STALENESS)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 1), (3, 2), (4, 3)])
def test_streams_continue_after_a_drain(ranks: int, microbatches: int, staleness: str) -> None:
    case = (ranks, microbatches, staleness, "momentum", STREAMS)
    assert_same(trained(*case, True), replayed(*case))


def trained_cases(ranks: int, cases: Sequence[tuple[int, str, str]]) -> list[Any]:
    """On one rank of several."""
    return [trained(ranks, microbatches, *rest, STREAMS, False) for microbatches, *rest in cases]  # type: ignore[arg-type]


PROCESSES = {
    2: [(1, "stash", "sgd"), (1, "2bw", "adam"), (3, "predict", "momentum")],
    3: [(2, "2bw", "momentum"), (1, "predict", "adamw")],
    4: [(1, "stash", "momentum"), (3, "2bw", "adam"), (3, "stash", "adamw"), (1, "predict", "adam")],
}


@pytest.mark.gloo
@pytest.mark.parametrize("ranks", PROCESSES)
def test_processes_have_every_bit_of_the_replayed_versions(ranks: int, pools: Pools, is_whole: bool) -> None:
    cases = PROCESSES[ranks] if is_whole else PROCESSES[ranks][::2]
    by_rank = pools[ranks].run(trained_cases, ranks, cases)
    for index, (microbatches, staleness, name) in enumerate(cases):
        states, losses = zip(*(results[index] for results in by_rank), strict=True)
        expected = replayed(ranks, microbatches, staleness, name, STREAMS)
        for loss in losses:
            assert_same(({key: value for state in states for key, value in state.items()}, loss), expected)
