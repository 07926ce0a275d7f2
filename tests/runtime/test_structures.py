"""Values of any structure pass from stage to stage, and the pipeline trains like the whole model."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock
from penstock.ir import leaves
from tests.parity import (
    EXECUTIONS,
    Execution,
    Values,
    WholeModel,
    accumulate,
    assert_close,
    assert_identical,
    split,
)
from tests.plans import quick_plan, shared_recordings
from tests.process_pool import Pools
from tests.small_models import WIDTH, Block, noise, restored, seeded
from tests.zoo import ZOO, has_labels

SCHEDULES = ("1f1b", "zb_h1", "interleaved", "zbv")
MODELS = (
    *("llama", "gpt2", "mixtral", "mamba2", "bert_question_answering", "t5", "bart", "vit", "clip"),
    *("unet", "lstm", "branches", "tied", "weight_used_twice", "batch_norm", "custom_function", "in_place"),
    *("non_contiguous", "channels_last", "dict_between", "dataclass_between", "model_output_between"),
    *("nested_between", "frozen", "lora", "checkpointed", "hooked", "bf16", "padded_mask", "hidden_states"),
)
# Of these only the parameters or the calls of another model differ, not the values between stages.
SAME_VALUES = (
    *("mixtral", "bart", "frozen", "lora", "checkpointed", "hooked", "padded_mask", "hidden_states"),
    *("llama", "gpt2", "mamba2", "bert_question_answering", "vit", "weight_used_twice", "batch_norm"),
)
ON_PROCESSES = ("llama", "t5", "unet", "branches", "in_place", "channels_last", "dataclass_between", "nested_between")
TIED = ("t5",)
"""what several ranks have is added up in another order than inside one process"""


def size_of(output: Any, target: Any = None) -> Tensor:
    """A loss for models without one: the mean square of all that they return."""
    found = [leaf for leaf in leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return torch.stack([(leaf.float() ** 2).mean() for leaf in found]).sum()


def planned(name: str, schedule: str, ranks: int = 2) -> tuple[Any, ...]:
    """A model of the zoo, its batch, its plan, and the loss that it lacks."""
    model, args, kwargs = ZOO[name]()
    plan = quick_plan(model, args, kwargs, ranks=ranks, microbatches=2, schedule=schedule, partitioner="auto")
    return model, args, kwargs, plan, None if has_labels(kwargs) else size_of


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        pytest.param(name, SCHEDULES[k % 4], marks=pytest.mark.whole if name in SAME_VALUES else ())
        for k, name in enumerate(MODELS)
    ],
)
def test_a_pipeline_of_a_zoo_model_passes_the_check(name: str, schedule: str) -> None:
    model, args, kwargs, plan, loss_fn = planned(name, schedule)
    report = penstock.check(model, plan, args, kwargs, loss_fn=loss_fn)
    assert report.ok, report


def zoo_values(plans: dict[str, penstock.Plan], execution: str) -> list[Values]:
    """The values after one step of each model."""
    found = []
    for name, plan in plans.items():
        model, args, kwargs = ZOO[name]()
        loss_fn = None if has_labels(kwargs) else size_of
        found.append(accumulate(split(execution, model, plan, loss_fn), *args, **kwargs))
    return found


@pytest.mark.gloo
def test_processes_have_every_bit_of_a_local_pipeline(pools: Pools, is_whole: bool) -> None:
    models = ON_PROCESSES if is_whole else ON_PROCESSES[3::2]
    plans = {name: planned(name, SCHEDULES[ON_PROCESSES.index(name) % 4])[3] for name in models}
    local = zoo_values(plans, "local")
    for model, expected, *parts in zip(plans, local, *pools[2].run(zoo_values, plans, "processes"), strict=True):
        found = {name: part[name] for name in expected for part in parts if name in part}
        if model in TIED:
            assert_close(found, expected, 1e-5)
        else:
            assert_identical(found, expected)


class Woven(nn.Module):
    """A chain in which early values, an input and a whole number are used far behind where they are made."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(8))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """The second value is read by four later blocks; indices cross a cut, the input and the mask come in late."""
        early, order, given = None, None, x
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1:
                early, order = x, x.detach().argsort(-1)
            elif number > 2 and number % 2:
                x = torch.relu_(x.gather(-1, order) + early * mask) - given
        return x


MASK = (noise(7, 1, seed=4) > 0).double()
X, TARGET = noise(7, WIDTH), noise(7, WIDTH, seed=1)


@cache
def woven_plan(schedule: str) -> penstock.Plan:
    sizes = {"ranks": 4, "microbatches": 3}
    return quick_plan(seeded(Woven()), (X, MASK), **sizes, schedule=schedule, partitioner="acyclic")


@shared_recordings()
def woven_values(plans: list[penstock.Plan], execution: str) -> list[Values]:
    return [
        accumulate(split(execution, model, plan, mse_loss), X, MASK, target=TARGET)
        for plan, model in zip(plans, restored(seeded(Woven())), strict=False)
    ]


@pytest.mark.parametrize("execution", EXECUTIONS, indirect=True)
def test_values_may_skip_stages_and_be_read_by_several(execution: Execution, is_whole: bool) -> None:
    expected = accumulate(WholeModel(seeded(Woven()), mse_loss), X, MASK, target=TARGET)
    # One schedule with whole backwards and one with split ones; stages differ only by that.
    schedules = SCHEDULES if is_whole and execution.name != "stages" else ("1f1b", "zbv")
    for found in execution.run(woven_values, 4, [woven_plan(schedule) for schedule in schedules]):
        assert_close(found, expected)
