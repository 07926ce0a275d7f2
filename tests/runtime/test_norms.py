"""Norms and clipping over all ranks are those of torch on the whole model, and never overflow."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock
from tests.parity import Values, assert_close, merged, values
from tests.plans import quick_plan
from tests.process_pool import Pools
from tests.small_models import WIDTH, chain, noise

X, TARGET = noise(7, WIDTH), noise(7, WIDTH, seed=1)
TYPES = (1.0, 2.0, 3.0, 0.5, math.inf)
LIMIT = 0.01


def pipe_of(local: bool = True) -> tuple[nn.Module, Any]:
    model = chain(4)
    plan = quick_plan(model, (X,), ranks=2, microbatches=3, schedule="1f1b")
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, local=local)
    pipe.step(X, target=TARGET)
    return model, pipe


def clipped(norm_type: float, limit: float = LIMIT) -> tuple[Tensor, Values]:
    model, _ = pipe_of()
    return nn.utils.clip_grad_norm_(model.parameters(), limit, norm_type), values(model)


@pytest.mark.parametrize("norm_type", TYPES)
@pytest.mark.parametrize("limit", [LIMIT, 1e6])
def test_clipping_is_that_of_torch_on_the_whole_model(norm_type: float, limit: float) -> None:
    model, pipe = pipe_of()
    norm, expected = clipped(norm_type, limit)
    assert_close({"norm": pipe.clip_grad_norm_(limit, norm_type)}, {"norm": norm})
    assert_close(values(model), expected)


def norms_on_a_rank() -> list[tuple[Tensor, Values]]:
    found = []
    for norm_type in TYPES:
        _, pipe = pipe_of(local=False)
        found.append((pipe.clip_grad_norm_(LIMIT, norm_type), values(pipe)))
    return found


@pytest.mark.gloo
def test_every_process_clips_by_the_norm_of_all(pools: Pools) -> None:
    for norm_type, (norm, first), (other, second) in zip(TYPES, *pools[2].run(norms_on_a_rank), strict=True):
        expected, plain = clipped(norm_type)
        assert norm == other
        assert_close({"norm": norm}, {"norm": expected})
        assert_close(merged([first, second]), plain)


def given_gradients(first: float, others: float) -> tuple[Tensor, Tensor]:
    """Norm and largest gradient after clipping to 1, where one gradient is another number, in float32."""
    model = chain(2).float()
    plan = quick_plan(model, (X.float(),), ranks=2, microbatches=1, schedule="1f1b")
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, local=not torch.distributed.is_initialized())
    for name, parameter in pipe.named_parameters():
        parameter.grad = torch.full_like(parameter, first if name == "0.linear.bias" else others)
    norm = pipe.clip_grad_norm_(1.0)
    return norm, torch.stack([parameter.grad.abs().max() for parameter in pipe.parameters()]).max()


def test_huge_gradients_do_not_overflow() -> None:
    norm, largest = given_gradients(1e30, 1e30)
    assert float(norm) == pytest.approx(1e30 * math.sqrt(40), rel=1e-6)
    assert float(largest) == pytest.approx(1 / math.sqrt(40), rel=1e-5)


def test_tiny_gradients_do_not_vanish() -> None:
    norm, largest = given_gradients(1e-30, 1e-30)
    assert float(norm) == pytest.approx(1e-30 * math.sqrt(40), rel=1e-6)
    assert float(largest) == pytest.approx(1e-30, rel=1e-6)


def test_zero_gradients_have_a_norm_of_zero_and_stay() -> None:
    assert given_gradients(0.0, 0.0) == (0.0, 0.0)


@pytest.mark.parametrize("first", [math.nan, math.inf])
def test_nan_and_inf_show_in_the_norm(first: float) -> None:
    norm, _ = given_gradients(first, 1.0)
    assert str(float(norm)) == str(first)


@pytest.mark.gloo
def test_every_process_sees_gradients_of_the_others_in_the_norm(pools: Pools) -> None:
    assert [str(float(norm)) for norm, _ in pools[2].run(given_gradients, math.nan, 1.0)] == ["nan", "nan"]
    (norm, _), (other, largest) = pools[2].run(given_gradients, 1e30, 0.0)
    assert norm == other
    assert float(norm) == pytest.approx(2e30, rel=1e-6)
    assert float(largest) == 0.0


def test_the_norm_of_no_gradients_is_zero_as_in_torch() -> None:
    model = chain(2)
    plan = quick_plan(model, (X,), ranks=2, microbatches=1, schedule="1f1b")
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, local=True)
    assert float(pipe.clip_grad_norm_(1.0)) == float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)) == 0.0


def test_a_limit_may_be_infinite_a_tensor_or_a_whole_number() -> None:
    for limit in (math.inf, torch.tensor(1e9), 10**9):
        model, pipe = pipe_of()
        before = [parameter.grad.clone() for parameter in model.parameters()]
        pipe.clip_grad_norm_(limit, "inf")
        after = [parameter.grad for parameter in model.parameters()]
        assert all(map(torch.equal, after, before))
