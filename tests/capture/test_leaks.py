"""Tensors that go from block to block behind the model's back are recorded, or refused."""

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import CaptureError
from penstock.partitioners import uniform
from penstock.stages import StageSequence
from tests.capture.models import Block
from tests.plans import quick_plan

BATCH = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Writer(Block):
    """Leaves what it computed in a place that others know."""

    def __init__(self, place, change=lambda tensor: tensor):
        super().__init__()
        self.place, self.change = place, change

    def forward(self, x):
        self.place["left"] = self.change(self.linear(x))
        return torch.tanh(self.place["left"])


class Reader(Block):
    """Uses what another block left."""

    def __init__(self, place):
        super().__init__()
        self.place = place

    def forward(self, x):
        return self.linear(x) * self.place["left"]


def whispering(change=lambda tensor: tensor):
    place = {}
    return nn.Sequential(Writer(place, change), Block(), Block(), Reader(place))


def reads(captured, name):
    return captured.graph[name].reads


def test_a_tensor_that_one_block_leaves_for_another_becomes_a_value():
    captured = penstock.capture(whispering(), (BATCH,))
    assert reads(captured, "3/mul") == ("3.linear", "0.linear")
    penstock.split(captured, uniform(captured.graph, 2))


def test_it_makes_no_difference_that_it_is_detached():
    captured = penstock.capture(whispering(torch.Tensor.detach), (BATCH,))
    assert reads(captured, "3/mul") == ("3.linear", "0/detach")
    penstock.split(captured, uniform(captured.graph, 3))


class Doubling(torch.autograd.Function):
    """Twice its argument."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def test_tensors_made_by_an_autograd_function_are_recorded():
    captured = penstock.capture(whispering(lambda tensor: Doubling.apply(tensor)), (BATCH,))
    assert reads(captured, "3/mul") == ("3.linear", "0/Doubling")
    penstock.split(captured, uniform(captured.graph, 2))


def test_an_autograd_function_whose_apply_is_kept_from_before_is_refused():
    model = nn.Sequential(Writer({}, Doubling.apply), Block())
    with pytest.raises(CaptureError, match=r"outside of any recorded call \(value: 0/mul, module: 0\)\ntry: call"):
        penstock.capture(model, (BATCH,), depth=2)


class Remembering(Block):
    """A block that is called twice and uses the second time what it left the first time."""

    def forward(self, x, is_first):
        if is_first:
            self.left = self.linear(x)
        return x + self.left


class Twice(nn.Module):
    """Calls the same block before and after another."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Remembering(), Block()])

    def forward(self, x):
        return self.blocks[0](self.blocks[1](self.blocks[0](x, True)), False)


def test_a_tensor_that_a_block_leaves_for_its_next_call_becomes_a_value():
    model = Twice()
    captured = penstock.capture(model, (BATCH,))
    assert reads(captured, "blocks.0/add@2") == ("blocks.1", "blocks.0.linear")
    run = StageSequence(captured, uniform(captured.graph, 2))
    assert torch.equal(run(BATCH + 1), model(BATCH + 1))


class Overwriting(Block):
    """Writes into what it is given, in a way that counts no version."""

    def forward(self, x):
        y = self.linear(x)
        x.data.mul_(2)
        return y


def test_what_a_block_writes_through_data_keeps_its_argument_in_one_stage():
    class Skipping(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Overwriting(), Block()])

        def forward(self, x):
            kept = self.blocks[0](x)
            return self.blocks[2](self.blocks[1](kept)) + kept

    captured = penstock.capture(Skipping(), (BATCH,))
    assert [group.writers for group in captured.graph.storage] == [("blocks.1",)]


class Biased(Block):
    """Calls a module that it is given."""

    def forward(self, x, bias):
        return torch.tanh(self.linear(x) + bias(x))


class SharedBias(nn.Module):
    """Gives every block the same module, as models with relative positions do."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Biased() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x, bias=self.bias)
        return x


def test_a_block_that_is_given_a_module_is_opened():
    model = SharedBias()
    captured = penstock.capture(model, (BATCH,))
    assert captured.graph["bias@2"].parameters == ("bias.weight", "bias.bias")
    plan = quick_plan(model, (BATCH,), ranks=2, microbatches=2, schedule="1f1b")
    assert penstock.check(model, plan, (BATCH,), loss_fn=torch.nn.functional.mse_loss, target=BATCH + 1).ok
