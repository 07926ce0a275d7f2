"""Control flow that depends on activations: functions and modules kept whole, and the errors for all others."""

import copy
import inspect

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import penstock
from penstock.errors import PenstockError
from tests.capture.models import Block
from tests.plans import quick_plan

BATCH = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
LARGE = BATCH.abs() * 1e4
TARGET = torch.zeros(6, 8)


def halved_if_large(x):
    """Reads an activation, and computes something else if it is large."""
    return x / 2 if x.abs().max() > 100 else x


def rows_over_mean(x):
    """Reads activations with numpy, as the matching of boxes in a detector's loss does."""
    rows = [int(row) for row in x.detach().mean(1).numpy().argsort()]
    return x[rows[len(rows) // 2 :]].mean()


def refuse_large(x):
    """Returns nothing, so it is recorded call by call."""
    if x.abs().max() > 100:
        raise OverflowError("large")


FUNCTIONS = {"halved": halved_if_large}


class Middle(nn.Module):
    """Two blocks around a decision."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Block(), Block()


class Choosing(Middle):
    """Calls another block if an activation is large."""

    def forward(self, x):
        return self.first(x) if x.abs().max() > 100 else self.second(x)


class Repeating(Middle):
    """Calls a block until its result is small."""

    def forward(self, x):
        x = self.first(x)
        while x.abs().max() > 100:
            x = self.second(x) / 8
        return x


class Picking(Middle):
    """Selects samples by their activations, and reads how many there are."""

    def forward(self, x):
        rows = (self.first(x).mean(1) > 0).nonzero()[:, 0]
        return x.index_add(0, rows, self.second(x[rows])) / (rows.shape[0] + 1)


class Routing(Middle):
    """Gives each expert its samples, by a list of numbers."""

    def forward(self, x):
        sizes = [int((x.mean(1) > 0).sum()), int((x.mean(1) <= 0).sum())]
        high, low = x[x.mean(1).argsort(descending=True)].split(sizes)
        return torch.cat([self.first(high), self.second(low)])


class Around(nn.Module):
    """A model with one of these between blocks."""

    def __init__(self, middle, function=lambda x: x):
        super().__init__()
        self.before = nn.ModuleList(Block() for _ in range(2))
        self.middle, self.function = middle, function
        self.after = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for block in self.before:
            x = block(x)
        x = self.function(self.middle(x))
        for block in self.after:
            x = block(x)
        return x


class Calling(Around):
    """Calls a global function, by its name or from a dict."""

    def forward(self, x):
        return FUNCTIONS["halved"](super().forward(halved_if_large(x)))


class Selecting(Around):
    """Returns a loss that depends on an order of the activations."""

    def forward(self, x):
        return rows_over_mean(super().forward(x))


class Raising(Around):
    """Calls a function that returns nothing."""

    def forward(self, x):
        x = super().forward(x)
        refuse_large(x)
        return x


class Deciding(Around):
    """Decides in the forward of the model itself."""

    def forward(self, x):
        x = super().forward(x)
        if x.abs().max() > 100:
            x = x / 2
        return x


def pipeline(model, blocks=(), loss_fn=mse_loss):
    sizes = {"ranks": 2, "microbatches": 1, "schedule": "1f1b"}
    plan = quick_plan(model, (BATCH,), **sizes, basic_blocks=blocks, loss_fn=loss_fn)
    return penstock.Pipeline(model, plan, loss_fn=loss_fn, local=True)


def assert_parity(model, blocks=(), loss_fn=mse_loss):
    whole, target = copy.deepcopy(model), {} if loss_fn is None else {"target": TARGET}
    pipe = pipeline(model, blocks, loss_fn)
    for batch in (BATCH, LARGE, -BATCH):
        result = pipe.step(batch, **target)
        output = whole(batch)
        loss = output if loss_fn is None else loss_fn(output, TARGET)
        loss.backward()
        torch.testing.assert_close(result.loss, loss.detach(), check_dtype=False)
    for (name, one), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("middle", [Choosing, Repeating, Picking, Routing])
def test_the_error_names_line_value_and_module_and_the_module_kept_whole_is_exact(middle):
    pipe = pipeline(Around(middle()))
    pipe.step(BATCH, target=TARGET)
    with pytest.raises(PenstockError) as raised:
        pipe.step(LARGE, target=TARGET)
    lines, start = inspect.getsourcelines(middle.forward)
    message = str(raised.value)
    assert "data-dependent control flow" in message
    assert any(f"{__file__}:{number}" in message for number in range(start, start + len(lines)))
    assert "recorded: " in message
    assert "found: " in message
    assert 'basic_blocks=["middle"]' in message
    assert_parity(Around(middle()), ["middle"])


def test_a_decision_in_the_model_itself_names_the_line_and_a_way_out():
    pipe = pipeline(Deciding(Block()))
    pipe.step(BATCH, target=TARGET)
    number = inspect.getsourcelines(Deciding.forward)[1] + 2
    with pytest.raises(PenstockError, match=rf"{__file__}:{number}.*\n.*global function"):
        pipe.step(LARGE, target=TARGET)


def test_a_global_function_that_reads_activations_is_one_call():
    graph = penstock.capture(Calling(Block()), (BATCH,)).graph
    assert [node.kind for node in graph.nodes if not node.module] == ["halved_if_large"] * 2
    assert_parity(Calling(Block()))


def test_a_loss_that_reads_activations_into_numpy_is_one_call():
    assert_parity(Selecting(Block()), loss_fn=None)


def test_a_function_that_returns_nothing_is_recorded_call_by_call():
    pipe = pipeline(Raising(Block()))
    pipe.step(BATCH, target=TARGET)
    with pytest.raises(PenstockError, match="data-dependent control flow"):
        pipe.step(LARGE, target=TARGET)


def test_a_function_that_uses_parameters_of_its_own_accord_is_recorded_call_by_call():
    model = Around(Block(), lambda x: x)
    hidden["weight"] = model.middle.linear.weight
    model.function = scaled_by_hidden
    graph = penstock.capture(model, (BATCH,)).graph
    assert any("middle.linear.weight" in node.parameters for node in graph.nodes if not node.is_block)


class Ordering(nn.Module):
    """Has no parameters, and orders samples by an activation that it reads with numpy."""

    def forward(self, x):
        return x[x.detach().mean(1).numpy().argsort().tolist()].sin()


def test_a_module_without_parameters_that_reads_activations_is_a_leaf():
    model = Around(Ordering())
    graph = penstock.capture(model, (BATCH,)).graph
    assert graph["middle"].is_block
    assert_parity(model)


class Halving(nn.Module):
    """Returns its argument as it is, unless that is large."""

    forward = staticmethod(halved_if_large)


def test_a_block_that_returns_its_argument_only_in_some_batches_is_refused():
    model = Around(nn.Sequential(Halving(), Block()))
    pipe = pipeline(model, ["middle.0"])
    pipe.step(BATCH, target=TARGET)
    with pytest.raises(PenstockError, match="recorded: its argument, found: another tensor"):
        pipe.step(LARGE, target=TARGET)


hidden = {}


def scaled_by_hidden(x):
    """Reads an activation, and uses a parameter that it is not given."""
    return x * hidden["weight"].mean() if x.abs().max() > 0 else x
