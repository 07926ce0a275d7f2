"""The parity harness fails where values differ, are missing, or have another type."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from penstock.capture import capture
from penstock.partitioners import uniform
from penstock.stages import sequence
from tests.parity import Batch, StagedModel, WholeModel, assert_close, assert_identical, difference, merged, one_step
from tests.small_models import WIDTH, chain, noise, seeded

ONES = torch.ones(2, dtype=torch.float64)


@pytest.mark.parametrize(
    "found",
    [
        {"gradient a": ONES * (1 + 1e-9)},
        {"gradient a": ONES * math.nan},
        {"gradient a": ONES * math.inf},
        {"gradient a": ONES.float()},
        {"gradient a": ONES[:1]},
        {"gradient a": None},
        {"gradient b": ONES},
        {},
        {"gradient a": ONES, "gradient b": ONES},
    ],
    ids=str,
)
def test_values_that_are_not_close_are_found(found: dict[str, Tensor | None]) -> None:
    assert difference(found, {"gradient a": ONES}).size > 1e-12
    with pytest.raises(AssertionError):
        assert_close(found, {"gradient a": ONES})


def test_rounding_is_close_and_not_identical() -> None:
    found, expected = {"gradient a": ONES * (1 + 1e-15)}, {"gradient a": ONES}
    assert_close(found, expected)
    with pytest.raises(AssertionError):
        assert_identical(found, expected)


def test_a_tiny_tensor_is_compared_with_the_largest_of_its_kind_only() -> None:
    tiny = ONES * 1e-12
    assert_close({"gradient a": tiny, "gradient b": ONES}, {"gradient a": 2 * tiny, "gradient b": ONES}, 1e-8)
    with pytest.raises(AssertionError):
        assert_close({"gradient a": tiny, "state b": ONES}, {"gradient a": 2 * tiny, "state b": ONES}, 1e-8)


def test_ranks_that_hold_different_bits_under_one_name_cannot_be_merged() -> None:
    assert merged([{"loss 0": ONES}, {"loss 0": ONES, "state a": ONES}]).keys() == {"loss 0", "state a"}
    with pytest.raises(AssertionError):
        merged([{"loss 0": ONES}, {"loss 0": ONES + 1e-15}])


def test_accumulation_over_microbatches_of_different_sizes_has_the_gradients_of_the_batch() -> None:
    x, target, expected, found = noise(7, WIDTH), noise(7, WIDTH, seed=1), chain(2), chain(2)
    loss = mse_loss(expected(x), target)
    loss.backward()
    result = WholeModel(found, mse_loss, microbatches=3).step(x, target=target)
    assert_close({"loss": result.loss}, {"loss": loss.detach()})
    assert_close({n: p.grad for n, p in found.named_parameters()}, {n: p.grad for n, p in expected.named_parameters()})


class Branch(nn.Module):
    """A value of the first layer that three later layers read."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        return self.layers[1](first) + self.layers[2](first) + self.layers[3](first)


def test_stages_that_lose_a_gradient_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = seeded(Branch()), Batch((noise(6, WIDTH),), {}, is_scored=False)
    captured = capture(model, batch.args)
    staged = StagedModel(captured, uniform(captured.graph, 4), batch.loss_fn)
    expected = one_step(WholeModel(model, batch.loss_fn), batch)
    assert_close(one_step(staged, batch), expected)
    monkeypatch.setattr(sequence, "add_gradient", dict.__setitem__)
    assert difference(one_step(staged, batch), expected).name.startswith("gradient layers.0")
