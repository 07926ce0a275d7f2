"""check: the proof on a user's own model, and what it says when something is wrong."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock
from penstock.training.parity import Comparison, Difference, ParityReport, compare

X, Y = torch.randn(10, 8, dtype=torch.float64), torch.randn(10, 8, dtype=torch.float64)


def chain(*extra):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), *(make() for make in extra), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers).double()


def checked(model, schedule="1f1b", **kwargs):
    plan = penstock.plan(model, (X,), ranks=2, microbatches=4, schedule=schedule)
    return penstock.check(model, plan, (X,), loss_fn=functional.mse_loss, target=Y, **kwargs)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zbv"])
def test_an_ordinary_model_equals_the_loop_and_the_whole_batch(schedule):
    report = checked(chain(), schedule)
    assert report.ok
    assert report.loop.is_identical
    assert report.whole.ok
    assert str(report).startswith("the pipeline has the numbers of the unsplit model")


def test_batch_norm_is_compared_with_the_loop_only_and_named():
    report = checked(chain(lambda: nn.BatchNorm1d(8)))
    assert report.ok
    assert report.whole is None
    assert "batch norm takes its statistics from each microbatch" in str(report)
    assert any(one.name == "buffer 0.1.running_mean" for one in report.loop.differences)


def test_dropout_is_compared_block_by_block():
    report = checked(chain(lambda: nn.Dropout(0.5)))
    assert report.ok
    assert "draws random numbers" in str(report)


def test_a_loss_that_is_weighted_otherwise_is_not_ok_and_the_way_out_is_named():
    report = checked(chain(), reduction="sum")
    assert report.loop.ok
    assert not report.ok
    assert "try reduction=" in str(report)


def test_the_model_is_left_as_it_was():
    model = chain(lambda: nn.BatchNorm1d(8), lambda: nn.Dropout(0.1))
    model[0][0].weight.grad = torch.ones(8, 8, dtype=torch.float64)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    checked(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model[0][0].weight.grad, torch.ones(8, 8, dtype=torch.float64))
    assert model[1][0].weight.grad is None


def test_the_first_difference_is_named_by_stage_and_parameter():
    expected = {"loss": torch.ones(()), "gradient of a": torch.ones(2), "gradient of b": torch.ones(2)}
    found = {**expected, "gradient of a": torch.tensor([1.0, 1.5]), "gradient of b": torch.tensor([1.0, 1.1])}
    comparison = compare("the loop", expected, found, {"gradient of a": 3, "gradient of b": 1})
    assert comparison.first_wrong.name == "gradient of b"
    assert comparison.largest.name == "gradient of a"
    report = ParityReport(comparison, None)
    assert str(report).startswith("the pipeline is WRONG")
    assert "first difference: gradient of b in stage 1: 0.1 (limit 1e-05)" in str(report)


@pytest.mark.parametrize(
    ("expected", "found", "ok"),
    [
        (None, None, True),
        (None, torch.zeros(2), False),
        (torch.zeros(2), None, False),
        (torch.zeros(2), torch.zeros(3), False),
        (torch.zeros(2), torch.tensor([0.0, float("nan")]), False),
        (torch.zeros(0), torch.zeros(0), True),
    ],
)
def test_what_is_missing_or_no_number_is_a_difference(expected, found, ok):
    assert compare("x", {"buffer b": expected}, {"buffer b": found}, {}).ok is ok


def test_nan_is_farther_off_than_anything():
    far = Comparison("x", (Difference("a", 0, 5.0, 1.0), Difference("b", 0, float("nan"), 1.0)))
    assert far.largest.name == "b"


class Penalised(nn.Module):
    """A layer that adds to the loss."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        """A layer."""
        x = torch.tanh(self.linear(x))
        penstock.add_loss(0.1 * x.square().mean())
        return x


def test_added_losses_are_added_in_the_unsplit_model_too():
    assert checked(nn.Sequential(*[Penalised() for _ in range(4)]).double()).ok
