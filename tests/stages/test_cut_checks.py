"""Tensors that lie over one another stay together."""

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import PartitionError
from penstock.partitioners import uniform
from tests.capture.models import Stack

BATCH = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def stack(first, last):
    """Blocks of which the first and the last have given weights."""
    model = Stack().eval()
    model.blocks[0].linear.weight, model.blocks[3].linear.weight = first, last
    return model


def cut(model):
    captured = penstock.capture(model, (BATCH,))
    return penstock.split(captured, uniform(captured.graph, 2))


def test_two_parameters_in_one_memory_are_not_taken_apart():
    memory = torch.randn(12, 8)
    model = stack(nn.Parameter(memory[:8]), nn.Parameter(memory[4:]))
    names = "blocks.0.linear.weight, blocks.3.linear.weight"
    with pytest.raises(PartitionError, match=rf"share memory.*names: {names}, stages: \[0, 1\]\)\ntry: use one"):
        cut(model)


@pytest.mark.parametrize("dim", [0, 1])
def test_parameters_side_by_side_in_one_memory_may_be_taken_apart(dim):
    first, last = torch.randn(16, 16).narrow(1 - dim, 0, 8).chunk(2, dim)
    assert len(cut(stack(nn.Parameter(first), nn.Parameter(last)))) == 2


def test_values_that_are_never_written_may_be_in_different_stages():
    memory = torch.randn(8, 8)
    assert len(cut(stack(*(nn.Parameter(memory, requires_grad=False) for _ in range(2))))) == 2
