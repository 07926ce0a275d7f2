"""A model is left exactly as it was."""

import random

import numpy as np
import pytest
import torch
from torch import nn

import penstock
from tests.capture.models import Skipping, Stack

BATCH = torch.randn(6, 4)


def state(model):
    return (
        [tensor.clone() for tensor in model.state_dict().values()],
        [parameter.grad for parameter in model.parameters()],
        [(module.training, len(module._forward_hooks), sorted(module.__dict__)) for module in model.modules()],
        (torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()),
        [vars(kind).get("__call__") for module in model.modules() for kind in type(module).__mro__],
        vars(torch.autograd.Function).get("apply"),
    )


def same(one, other):
    return all(
        torch.equal(a, b)
        if isinstance(a, torch.Tensor)
        else np.array_equal(a, b)
        if isinstance(a, np.ndarray)
        else a == b
        for a, b in zip(flat(one), flat(other), strict=True)
    )


def flat(thing):
    return [leaf for item in thing for leaf in flat(item)] if isinstance(thing, list | tuple) else [thing]


def test_capture_leaves_everything_as_it_was():
    model = Stack()
    model.norm.register_forward_hook(lambda *_: None)
    model(BATCH).sum().backward()
    before = state(model)
    penstock.capture(model, (BATCH,))
    assert same(before, state(model))


def test_a_refused_capture_leaves_everything_as_it_was():
    model = Skipping(blocks=16)
    before = state(model)
    with pytest.raises(penstock.PenstockError):
        penstock.capture(model, (BATCH,))
    assert same(before, state(model))


class Interrupted(nn.Module):
    """A block during which ctrl-c is pressed."""

    def forward(self, x):
        raise KeyboardInterrupt


def test_an_interrupted_capture_leaves_everything_as_it_was():
    model = Stack()
    model.drop = Interrupted()
    before = state(model)
    with pytest.raises(KeyboardInterrupt):
        penstock.capture(model, (BATCH,))
    assert same(before, state(model))


def test_attributes_that_a_forward_sets_are_taken_back():
    class Setting(Stack):
        def forward(self, x):
            self.seen = x.shape
            return super().forward(x)

    model = Setting()
    penstock.capture(model, (BATCH,))
    assert not hasattr(model, "seen")
