"""Stages and the model that they are stages of: shared weights, modes, replaced tensors, other lengths."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock
from penstock.errors import PartitionError
from penstock.partitioners import uniform
from penstock.stages import StageSequence, check


class Block(nn.Module):
    """A layer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        """A layer."""
        return torch.tanh(self.linear(x))


class TiedByUse(nn.Module):
    """The weight of the embedding is used again as the head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, tokens):
        """Logits."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.linear(x, self.embed.weight)


class Glue(nn.Module):
    """Blocks, and something between them."""

    def __init__(self, between):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("shift", torch.zeros(8))
        self.between = between

    def forward(self, x):
        """All blocks, with the glue after each."""
        for block in self.blocks:
            x = self.between(self, block(x))
        return x


def split(model, *args, stages=2):
    captured = penstock.capture(model, args)
    partition = uniform(captured.graph, stages)
    return captured, partition, penstock.split(captured, partition)


def test_a_weight_used_again_in_another_stage_is_in_both_stages():
    tokens = torch.randint(0, 20, (3, 5))
    _, _, (first, last) = split(TiedByUse(), tokens)
    assert "embed.weight" in first.state_dict()
    assert "embed.weight" in last.state_dict()


def test_the_mode_of_a_stage_reaches_what_happens_between_its_parts():
    model = Glue(lambda self, x: functional.dropout(x, 0.5, self.training))
    captured, partition, stages = split(model, torch.randn(4, 8))
    for stage in stages:
        stage.eval()
    run, x = StageSequence(captured, partition), torch.randn(4, 8)
    assert torch.equal(run(x), run(x))
    assert torch.equal(run(x), model.eval()(x))


@pytest.mark.parametrize("name", ["scale", "shift"])
def test_a_tensor_replaced_after_the_split_is_refused(name):
    model = Glue(lambda self, x: x * self.scale + self.shift)
    captured, partition, _ = split(model, torch.randn(4, 8))
    run, x = StageSequence(captured, partition), torch.randn(4, 8)
    old = getattr(model, name)
    setattr(model, name, nn.Parameter(torch.full((8,), 2.0)) if name == "scale" else torch.full((8,), 2.0))
    with pytest.raises(PartitionError, match=f"was replaced after the split \\(name: {name}\\)"):
        run(x)
    setattr(model, name, old)
    with torch.no_grad():
        old.fill_(2.0)
    assert torch.equal(run(x), model(x))


class Summed(nn.Module):
    """Glue that loops over the length of the batch before the blocks."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        """The sum over the length, then blocks with skips."""
        x = self.first(x)
        total = x[:, 0]
        for place in range(1, x.shape[1]):
            total = total + x[:, place] * 0.5
        for block in self.blocks:
            total = total + block(total)
        return total


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("length", [2, 5, 9])
def test_glue_that_loops_over_the_length_fits_other_lengths(stages, length):
    model = Summed()
    captured, partition, _ = split(model, torch.randn(4, 3, 8), stages=stages)
    x = torch.randn(4, length, 8)
    assert torch.equal(StageSequence(captured, partition)(x), model(x))


class Masked(nn.Module):
    """Logits of minus infinity, and a gradient that is zero but for rounding."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.offset = nn.Parameter(torch.randn(1))

    def forward(self, x):
        """What softmax takes away again has no gradient."""
        for block in self.blocks:
            x = block(x)
        chances = functional.softmax(x + self.offset, -1)
        return chances, x.masked_fill(x < 0, float("-inf"))


def test_the_check_knows_infinity_and_gradients_that_are_rounding_only():
    model = Masked()
    captured = penstock.capture(model, (torch.randn(4, 8),))
    check(captured, uniform(captured.graph, 3))


def test_backward_before_forward_and_of_no_output_is_refused():
    captured, partition, _ = split(Glue(lambda self, x: x), torch.randn(4, 8))
    run = StageSequence(captured, partition)
    with pytest.raises(PartitionError, match="needs a forward"):
        run.backward({0: torch.ones(4, 8)})
    run(torch.randn(4, 8))
    with pytest.raises(PartitionError, match=r"must belong to outputs of the model \(position: 3, outputs: 1\)"):
        run.backward({3: torch.ones(4, 8)})


def test_split_names_the_types_that_it_accepts():
    with pytest.raises(PartitionError, match=r"needs a captured model(.|\n)*got: \('Glue', 'int'\)"):
        penstock.split(Glue(lambda self, x: x), 2)
