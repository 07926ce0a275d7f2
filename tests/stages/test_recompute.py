"""A stage that recomputes gives the same numbers, and runs each block once more in backward and no oftener."""

import pytest
import torch
from torch import nn

from penstock.partitioners import uniform
from tests.parity import StagedModel, assert_identical, one_step
from tests.selection import alternated
from tests.stages.architectures import Architecture
from tests.stages.blocks import AT_ONCE, WAITING, Does, rows
from tests.stages.second_stage import SecondStage
from tests.zoo import ambient

WAYS = pytest.mark.parametrize("is_split", [False, True], ids=["whole", "split"])
MODELS = ("llama", "gpt2", "mixtral", "t5", "resnet50", "batch_norm", "dropout", "lora", "in_place", "checkpointed")


class Counting(nn.Module):
    """Draws random numbers, writes its buffer, reads it, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 8), []
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.calls.append(self.steps.item())
        self.steps += 1
        return nn.functional.dropout(self.linear(x) * self.steps.clone(), 0.5).relu()


@WAYS
def test_each_block_runs_once_more_in_backward_on_its_buffers_as_they_were(is_split):
    module = SecondStage(Counting(), rows(4, 8))
    expected = module.gradients(is_split)
    counting = module.model[1]
    counting.steps.zero_()
    counting.calls.clear()
    module.stage.recomputes = True
    assert_identical(expected, module.gradients(is_split))
    assert counting.calls == [0, 1, 2, 0, 1, 2]
    assert counting.steps == 3


# Torch refuses to differentiate a function (torch.func) inside a checkpoint.
RECOMPUTED = [name for name in (*WAITING, *AT_ONCE) if name != "a function that is differentiated"]


@WAYS
@pytest.mark.parametrize("name", RECOMPUTED)
def test_a_recomputed_block_gives_the_same_gradients(name, is_split):
    torch.manual_seed(0)
    build, example = {**WAITING, **AT_ONCE}[name]
    module = SecondStage(build(), example)
    expected = module.gradients(False)
    module.stage.recomputes = True
    assert_identical(expected, module.gradients(is_split))


@pytest.mark.parametrize(("name", "is_split"), alternated([(name, way) for name in MODELS for way in (False, True)]))
def test_a_model_whose_stages_recompute_has_the_same_outputs_gradients_and_buffers(name, is_split):
    with ambient(name):
        captured, batch = Architecture(name, "blocks").captured("plain")
        partition = uniform(captured.graph, 3)
        expected = one_step(StagedModel(captured, partition, batch.loss_fn), batch)
        recomputing = StagedModel(captured, partition, batch.loss_fn, is_split)
        for stage in recomputing.sequence.stages:
            stage.recomputes = True
        assert_identical(one_step(recomputing, batch), expected)


def test_weight_gradients_of_a_recomputed_block_wait_as_well():
    module = SecondStage(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), rows(4, 8))
    module.stage.recomputes, waiting = True, []
    module.gradients(True, lambda: waiting.extend(p.grad is None for p in module.stage.parameters()))
    assert waiting == [True] * 4


def test_a_recomputed_block_keeps_only_its_inputs():
    saved = []

    def forward(x, one, two):
        return two(one(x).exp())

    module = SecondStage(Does(forward, nn.Linear(8, 64), nn.Linear(64, 8)), rows(4, 8))
    for recomputes in (False, True):
        module.stage.recomputes, sizes = recomputes, []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, sizes=sizes: sizes.append(x.shape) or x, lambda x: x):
            module.run(is_split=False)
        saved.append(sizes)
    assert torch.Size([4, 64]) in saved[0]
    assert torch.Size([4, 64]) not in saved[1]


def test_a_block_that_writes_its_input_is_not_recomputed():
    calls = []

    def forward(x, one):
        calls.append(1)
        return one(x.mul_(2))

    module = SecondStage(nn.Linear(8, 8), rows(4, 8), Does(forward, nn.Linear(8, 8)))
    expected = module.gradients(False)
    module.stage.recomputes = True
    calls.clear()
    assert_identical(expected, module.gradients(True))
    assert len(calls) == 3
