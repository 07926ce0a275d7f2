"""What a user changes between two steps is seen, and what a cut would tear apart is refused."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock
from penstock.errors import PartitionError
from penstock.partitioners import cut_before, uniform
from penstock.stages import StageSequence
from tests.capture.models import Stack

BATCH = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


class Annealed(Stack):
    """Its glue goes by attributes."""

    alpha, p, table = 1.0, 0.0, None

    def forward(self, x):
        x = self.blocks[0](self.embed(x) * self.alpha)
        x = functional.dropout(x, self.p)
        if not x.is_contiguous() or x.requires_grad is False:
            x = x * 2
        return self.head(self.blocks[1](x if self.table is None else x * self.table))


def staged(model, number=3):
    captured = penstock.capture(model, (BATCH,))
    return StageSequence(captured, uniform(captured.graph, number))


CHANGES = {
    "an attribute": lambda model: setattr(model, "alpha", 0.5),
    "a tensor that is an attribute": lambda model: setattr(model, "table", torch.arange(8.0)),
    "a probability": lambda model: setattr(model, "p", 1.0),
    "a hook": lambda model: model.register_forward_hook(lambda *call: call[-1] * 3),
    "what is trained": lambda model: model.requires_grad_(False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_two_steps_is_seen(change):
    model = Annealed()
    run = staged(model)
    assert torch.equal(run(BATCH), model(BATCH))
    CHANGES[change](model)
    assert torch.equal(run(BATCH), model(BATCH))


def test_a_batch_laid_out_otherwise_is_another_form():
    model = Annealed()
    run = staged(model)
    turned = torch.randn(4, 6).T
    assert torch.equal(run(turned), model(turned))


def test_a_model_moved_to_another_dtype_is_recorded_again():
    model = Annealed()
    run = staged(model)
    model.double()
    assert torch.equal(run(BATCH.double()), model(BATCH.double()))


def test_a_module_that_is_replaced_after_the_split_is_refused():
    model = Annealed()
    run = staged(model)
    model.blocks[1] = nn.Identity()
    with pytest.raises(PartitionError, match=r"replaced after the split \(module: blocks.1\)\ntry: a new plan and Pip"):
        run(BATCH)


class Growing(Stack):
    """Calls all blocks that it has."""

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_a_module_that_is_added_after_the_split_is_refused():
    model = Growing()
    run = staged(model)
    model.blocks.append(nn.Linear(8, 8))
    with pytest.raises(PartitionError, match=r"all parameters of a block .*: blocks.*\ntry: a new plan and Pipeline"):
        run(BATCH)


def test_modules_keep_the_mode_that_the_user_set():
    model = Stack()
    model.norm.eval()
    captured = penstock.capture(model, (BATCH,))
    penstock.split(captured, uniform(captured.graph, 3))
    assert model.training
    assert not model.norm.training


class Comparing(Stack):
    """Decides by two values at once."""

    def forward(self, x):
        a = self.blocks[0](self.embed(x))
        b = self.blocks[1](a)
        c = self.blocks[2](b)
        return self.head(c) if torch.equal(a, c) else self.head(2 * c)


def test_a_decision_by_values_of_two_stages_is_made_where_both_are_or_refused():
    model = Comparing()
    captured = penstock.capture(model, (BATCH,))
    with pytest.raises(PartitionError, match=r"depends on values of several stages .*read by: equal"):
        penstock.split(captured, cut_before(captured.graph, ["blocks.1", "blocks.2"]))


class Remembering(Stack):
    """Writes a buffer between blocks, and reads it elsewhere."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        before = self.steps.clone()
        x = self.blocks[0](self.embed(x))
        self.steps.add_(1)
        return self.head(self.blocks[1](x) * (before + 1))


def test_a_buffer_that_is_read_before_it_is_written_has_its_old_content():
    model, other = Remembering(), Remembering()
    other.load_state_dict(model.state_dict())
    captured = penstock.capture(model, (BATCH,))
    run = StageSequence(captured, cut_before(captured.graph, ["blocks.1"]))
    for _ in range(3):
        assert torch.equal(run(BATCH), other(BATCH))
    assert model.steps == other.steps == 3


def test_an_output_that_is_returned_twice_gets_both_gradients():
    class Twice(Stack):
        def forward(self, x):
            loss = super().forward(x).sum()
            return loss, loss

    model = Twice().eval()
    run = staged(model)
    run(BATCH)
    run.backward({0: None, 1: None})
    found = model.head.bias.grad.clone()
    model.zero_grad()
    sum(model(BATCH)).backward()
    assert torch.equal(found, model.head.bias.grad)


class Restless(Stack):
    """Changes whatever it can get hold of."""

    def __init__(self):
        super().__init__()
        self.notes, self.count = [], torch.zeros(())

    def forward(self, x):
        self.notes.append(len(x))
        with torch.no_grad():
            self.count += 1
            self.head.weight.mul_(0.5)
        return super().forward(x)


def test_capture_puts_back_lists_plain_tensors_and_parameters():
    model = Restless()
    weight = model.head.weight.detach().clone()
    penstock.capture(model, (BATCH,))
    assert model.notes == []
    assert model.count == 0
    assert torch.equal(model.head.weight, weight)
