"""A stage that recomputes gives the same numbers, and runs each block once more in backward and no oftener."""

import pytest
import torch
from torch import nn

from penstock.partitioners import uniform
from penstock.stages import Sequence
from tests.stages import parity
from tests.stages.behind import Behind, differing
from tests.stages.blocks import AT_ONCE, WAITING, Does, rows
from tests.stages.trials import Trial
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
    module = Behind(Counting(), rows(4, 8))
    expected = module.gradients(is_split)
    counting = module.model[1]
    counting.steps.zero_()
    counting.calls.clear()
    module.stage.recomputes = True
    assert differing(expected, module.gradients(is_split)) == []
    assert counting.calls == [0, 1, 2, 0, 1, 2]
    assert counting.steps == 3


# Torch refuses to differentiate a function (torch.func) inside a checkpoint.
RECOMPUTED = [name for name in (*WAITING, *AT_ONCE) if name != "a function that is differentiated"]


@WAYS
@pytest.mark.parametrize("name", RECOMPUTED)
def test_a_recomputed_block_gives_the_same_gradients(name, is_split):
    torch.manual_seed(0)
    build, example = {**WAITING, **AT_ONCE}[name]
    module = Behind(build(), example)
    expected = module.gradients(False)
    module.stage.recomputes = True
    assert differing(expected, module.gradients(is_split)) == []


@WAYS
@pytest.mark.parametrize("name", MODELS)
def test_a_model_whose_stages_recompute_gives_the_same_outcome(name, is_split, monkeypatch):
    def recomputing(*args):
        sequence = Sequence(*args)
        for stage in sequence.stages:
            stage.recomputes = True
        return sequence

    with ambient(name):
        captured, batch = Trial(name, "blocks").recorded("plain")
        partition = uniform(captured.graph, 3)
        expected = parity.of_stages(captured, partition, batch)
        monkeypatch.setattr(parity, "Sequence", recomputing)
        assert parity.difference(expected, parity.of_stages(captured, partition, batch, is_split)).size == 0


def test_weight_gradients_of_a_recomputed_block_wait_as_well():
    module = Behind(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), rows(4, 8))
    module.stage.recomputes, waiting = True, []
    module.gradients(True, lambda: waiting.extend(p.grad is None for p in module.stage.parameters()))
    assert waiting == [True] * 4


def test_a_block_keeps_only_what_it_was_given():
    saved = []

    def forward(x, one, two):
        return two(one(x).exp())

    module = Behind(Does(forward, nn.Linear(8, 64), nn.Linear(64, 8)), rows(4, 8))
    for recomputes in (False, True):
        module.stage.recomputes, sizes = recomputes, []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, sizes=sizes: sizes.append(x.shape) or x, lambda x: x):
            module.run(is_split=False)
        saved.append(sizes)
    assert torch.Size([4, 64]) in saved[0]
    assert torch.Size([4, 64]) not in saved[1]


def test_a_block_that_writes_what_it_is_given_is_not_recomputed():
    calls = []

    def forward(x, one):
        calls.append(1)
        return one(x.mul_(2))

    module = Behind(nn.Linear(8, 8), rows(4, 8), Does(forward, nn.Linear(8, 8)))
    expected = module.gradients(False)
    module.stage.recomputes = True
    calls.clear()
    assert differing(expected, module.gradients(True)) == []
    assert len(calls) == 3
