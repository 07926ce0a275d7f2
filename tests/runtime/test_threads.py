"""Steps of several threads of one process run one after another, or are refused."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn.functional import dropout, mse_loss

import penstock
from penstock.runtime.executor import watch_step
from tests.plans import quick_plan
from tests.small_models import WIDTH, Block, noise, seeded

X, TARGET = noise(6, WIDTH), noise(6, WIDTH, seed=1)


class Interrupted(nn.Module):
    """Dropout, before which something else happens."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Callable[[], object] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        """Dropout."""
        self.before()
        return dropout(x, 0.5)


def pipeline(model: nn.Module) -> penstock.Pipeline:
    plan = quick_plan(model, (X,), ranks=2, microbatches=2, schedule="1f1b")
    return penstock.Pipeline(model, plan, loss_fn=mse_loss, local=True)


def test_a_step_of_another_thread_does_not_change_random_numbers() -> None:
    models = [seeded(nn.Sequential(Block(), Interrupted(), Block()), seed) for seed in (1, 2)]
    expected = [pipeline(model).step(X, target=TARGET).loss for model in models]
    (own, other), (pipe, other_pipe) = models, map(pipeline, models)
    for each in (pipe, other_pipe):
        each.step(X, target=TARGET)  # records the model
        each.num_steps = 0
    is_inside, may_continue, found = threading.Event(), threading.Event(), []
    thread = threading.Thread(target=lambda: found.append(other_pipe.step(X, target=TARGET).loss))

    def start() -> None:
        own[1].before = lambda: None
        thread.start()
        is_inside.wait(0.1)  # the other thread waits for the end of this step

    def pause() -> None:
        is_inside.set()
        may_continue.wait(60)

    own[1].before, other[1].before = start, pause
    assert pipe.step(X, target=TARGET).loss == expected[0]
    may_continue.set()
    thread.join()
    assert found == expected[1:]


def test_processes_refuse_a_step_while_another_thread_runs_one() -> None:
    def ignore(*_: Any) -> None: ...

    monitor = SimpleNamespace(step_started=ignore, step_failed=ignore, step_finished=ignore)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with watch_step(monitor, 3, True):
                pass
        except penstock.RunError as error:
            errors.append(error)

    with watch_step(None, 0, True):
        with watch_step(monitor, 0, True):  # by the same thread, as in a loss function
            pass
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    with pytest.raises(penstock.RunError, match="another thread of this process is running a step"):
        raise errors[0]
    run()
    assert len(errors) == 1
