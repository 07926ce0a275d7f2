"""Random numbers that decide between blocks, as in layer drop, are drawn per step, and alike on every rank."""

import random
from random import random as seen

import numpy as np
import pytest
import torch
from torch import nn

import penstock
from penstock.capture import DrawSeed
from penstock.errors import CaptureError
from penstock.partitioners import uniform
from tests.capture.models import Stack
from tests.plans import quick_plan

BATCH = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
DROPS = {
    "random.random": lambda self: random.random() < 0.5,
    "a name of its own": lambda self: seen() < 0.5,
    "random.uniform": lambda self: not random.uniform(1, 3) >= 2,
    "arithmetic": lambda self: 1 - 2 * random.random() > 0,
    "rounding": lambda self: int(3 * random.random()) == 1,
    "random.randint": lambda self: random.randint(0, 2) == 1,
    "random.choice": lambda self: random.choice([True, False]),
    "numpy": lambda self: np.random.uniform(0, 1) < 0.5,
    "torch without dimensions": lambda self: torch.rand([]) < 0.5,
    "torch with one element": lambda self: torch.rand(1).item() < 0.5,
}


class LayerDrop(Stack):
    """Leaves out blocks at random in training."""

    def __init__(self, drops):
        super().__init__()
        self.drops = drops

    def forward(self, x):
        x = self.embed(x)
        for number, block in enumerate(self.blocks):
            if number in (0, 3) or not self.drops(self):
                x = block(x)
        return self.head(x)


def blocks(recording):
    return tuple(node.name for node in recording.graph.nodes if node.name.startswith("blocks"))


@pytest.mark.parametrize("name", DROPS)
def test_a_seed_decides_which_blocks_are_called_in_stages_as_in_the_model(name):
    captured = penstock.capture(LayerDrop(DROPS[name]), (BATCH,))
    found = {blocks(captured.recording((BATCH,), {}, seed)) for seed in range(12)}
    assert len(found) > 2
    # split() compares the stages with the model, both with the same draws.
    penstock.split(captured, uniform(captured.graph, 2))
    known = captured.num_recordings
    assert [blocks(captured.recording((BATCH,), {}, seed)) for seed in range(12)]
    assert captured.num_recordings == known


def test_the_example_is_recorded_with_draws_that_call_all_blocks():
    graph = penstock.capture(LayerDrop(DROPS["numpy"]), (BATCH,)).graph
    assert {f"blocks.{number}" for number in range(4)} <= {node.name for node in graph.nodes}


@pytest.mark.parametrize("name", ["numpy", "torch without dimensions"])
def test_all_microbatches_of_a_step_leave_out_the_same_blocks_as_the_whole_batch(name):
    model = LayerDrop(DROPS[name])
    plan = quick_plan(model, (BATCH,), ranks=2, microbatches=3, schedule="1f1b")
    pipe = penstock.Pipeline(model, plan, loss_fn=nn.functional.mse_loss, local=True)
    target, captured, dropped = torch.zeros(6, 3), penstock.capture(model, (BATCH,)), set()
    for _ in range(6):
        model.zero_grad()
        result = pipe.step(BATCH, target=target)
        found = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        whole = nn.functional.mse_loss(captured.run_unsplit_with_draws(DrawSeed(result.seed), BATCH), target)
        whole.backward()
        torch.testing.assert_close(result.loss, whole.detach())
        torch.testing.assert_close(found, [parameter.grad for parameter in model.parameters()])
        dropped.add(tuple(block.linear.weight.grad is None for block in model.blocks))
    assert len(dropped) > 1


def draw_mask(x, share):
    return np.random.rand(*x.shape) < share


class Masked(Stack):
    """Masks activations by a function that draws with numpy, and scales them by a number."""

    def forward(self, x):
        x = self.blocks[0](self.embed(x))
        x = x.masked_fill(torch.tensor(draw_mask(x, 0.5)), 0.0) * random.random()
        return self.head(self.blocks[1](x + torch.as_tensor(np.random.rand(8), dtype=x.dtype)))


def test_a_function_that_draws_an_array_is_one_call():
    model = Masked()
    captured = penstock.capture(model, (BATCH,))
    nodes = {node.name: node.is_random for node in captured.graph.nodes}
    assert nodes["/draw_mask"]
    assert nodes["/random"]
    assert nodes["/rand"]
    first, second = (captured.run_unsplit_with_draws(DrawSeed(seed), BATCH) for seed in (1, 2))
    assert not torch.equal(first, second)
    assert torch.equal(first, captured.run_unsplit_with_draws(DrawSeed(1), BATCH))
    plan = quick_plan(model, (BATCH,), ranks=2, microbatches=2, schedule="1f1b")
    assert penstock.check(model, plan, (BATCH,), loss_fn=nn.functional.mse_loss, target=torch.zeros(6, 3)).ok


UNRECORDED = {
    "a draw by a name inside an object": (
        lambda self, draw=random.random: draw() < 0.5,
        "which cannot be recorded as a call",
    ),
    "an array that is computed with": (lambda self: (np.random.rand(3) < 0.5).all(), "computes with an array"),
    "an order": (lambda self: random.shuffle([1, 2, 3]), "which cannot be recorded as a call"),
}


@pytest.mark.parametrize("name", UNRECORDED)
def test_other_draws_of_python_are_refused_whatever_they_decide(name):
    draw, problem = UNRECORDED[name]
    with pytest.raises(CaptureError, match=problem) as caught:
        penstock.capture(LayerDrop(draw), (BATCH,))
    assert "layerdrop=0" in caught.value.hint


def test_generators_of_the_user_are_left_as_they_were():
    model = LayerDrop(DROPS["numpy"])
    plan = penstock.plan(model, (BATCH,), ranks=2, microbatches=2, schedule="1f1b", partitioner="uniform")
    pipe = penstock.Pipeline(model, plan, loss_fn=nn.functional.mse_loss, local=True)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    for _ in range(3):
        pipe.step(BATCH, target=torch.zeros(6, 3))
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


@pytest.mark.parametrize("kept", [0, 1], ids=["none kept", "one kept"])
def test_a_call_of_the_whole_model_draws_no_normal_number_of_the_user(kept):
    """Numpy draws normal numbers in pairs, and keeps the second one."""
    captured = penstock.capture(LayerDrop(DROPS["numpy"]), (BATCH,))
    np.random.seed(3)
    expected = np.random.normal(size=kept + 2).tolist()
    np.random.seed(3)
    drawn = np.random.normal(size=kept).tolist()
    captured.run_unsplit_with_draws(DrawSeed(1), BATCH)
    assert drawn + np.random.normal(size=2).tolist() == expected
