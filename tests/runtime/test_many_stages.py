"""Building a local pipeline and its first step take work in proportion to the number of stages, not to its square."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import mse_loss

import penstock
from tests.plans import quick_plan
from tests.small_models import WIDTH, chain, noise

MAX_GROWTH = 2.3
"""of the number of calls for twice as many stages; 2 is linear"""


def num_calls(run: Callable[[], object]) -> int:
    """How many Python functions, comprehensions and steps of generators a call runs through."""
    calls = 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def counted(stages: int) -> list[int]:
    """The calls of building, of the first step and of the second, with a rank for every stage."""
    model, x = chain(stages), noise(4, WIDTH)
    plan = quick_plan(model, (x,), loss_fn=mse_loss, ranks=stages, microbatches=2, schedule="1f1b")
    pipes: list[penstock.Pipeline] = []
    return [
        num_calls(lambda: pipes.append(penstock.Pipeline(model, plan, loss_fn=mse_loss, local=True))),
        num_calls(lambda: pipes[0].step(x, target=x)),
        num_calls(lambda: pipes[0].step(x, target=x)),
    ]


def test_twice_the_stages_take_about_twice_the_calls() -> None:
    counted(2)  # fills caches
    torch.manual_seed(0)
    few, many = counted(20), counted(40)
    assert [after / before < MAX_GROWTH for before, after in zip(few, many, strict=True)] == [True] * 3, (few, many)
