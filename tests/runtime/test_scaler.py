"""A scaler works with several optimizers, with clipping before and after unscaling, and refuses what would be wrong."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock
from tests.parity import assert_identical
from tests.plans import quick_plan
from tests.process_pool import Pools
from tests.small_models import WIDTH, chain, noise

X, TARGET = noise(8, WIDTH), noise(8, WIDTH, seed=1)
SCALE = 1024.0


def scaled(local: bool = True, **given: Any) -> tuple[Any, penstock.GradScaler]:
    """A pipeline whose gradients are scaled, after a step."""
    scaler = penstock.GradScaler(SCALE)
    model = chain(4)
    plan = quick_plan(model, (X,), ranks=2, microbatches=2, schedule="1f1b")
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, scaler=scaler, local=local, **given)
    pipe.step(X, target=TARGET)
    return pipe, scaler


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def weights(pipe: Any) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in pipe.named_parameters()}


def clipped_first(local: bool = True) -> tuple[Tensor, dict[str, Tensor]]:
    """The norm, and the weights after a step, where gradients are clipped before they are unscaled."""
    pipe, scaler = scaled(local)
    norm = pipe.clip_grad_norm_(0.01)
    scaler.step(optimizer_of(pipe.parameters()))
    return norm, weights(pipe)


def unscaled_first(local: bool = True) -> tuple[Tensor, dict[str, Tensor]]:
    """The same as torch documents it: unscaled, then clipped."""
    pipe, scaler = scaled(local)
    optimizer = optimizer_of(pipe.parameters())
    scaler.unscale_(optimizer)
    norm = pipe.clip_grad_norm_(0.01)
    scaler.step(optimizer)
    return norm, weights(pipe)


def test_clipping_before_unscaling_is_clipping_after_it() -> None:
    (norm, found), (expected_norm, expected) = clipped_first(), unscaled_first()
    assert norm == expected_norm
    assert_identical(found, expected)


@pytest.mark.gloo
def test_every_process_clips_by_the_norm_without_the_scale(pools: Pools) -> None:
    norms = {float(norm) for norm, _ in (*pools[2].run(clipped_first, False), *pools[2].run(unscaled_first, False))}
    # Ranks add up their norms in another order than one process does, so the last bit may differ.
    assert list(norms) == pytest.approx([float(unscaled_first()[0])], rel=1e-14)


def test_an_overflow_that_is_clipped_is_still_one() -> None:
    pipe, scaler = scaled()
    next(iter(pipe.parameters())).grad.fill_(float("inf"))
    assert float(pipe.clip_grad_norm_(1.0)) == float("inf")
    before = weights(pipe)
    scaler.step(optimizer_of(pipe.parameters()))
    assert scaler.skipped == 1
    assert_identical(weights(pipe), before)


def test_every_optimizer_is_unscaled() -> None:
    pipe, scaler = scaled()
    plain, _ = scaled()
    first, *rest = pipe.parameters()
    optimizers = [optimizer_of([first]), optimizer_of(rest)]
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    for parameter in plain.parameters():
        parameter.data -= 0.5 * parameter.grad / SCALE
    assert_identical(weights(pipe), weights(plain))


def test_clipping_when_one_of_two_optimizers_is_unscaled_is_refused() -> None:
    pipe, scaler = scaled()
    scaler.unscale_(optimizer_of([next(pipe.parameters())]))
    with pytest.raises(penstock.RunError, match="either all gradients or none must be unscaled"):
        pipe.clip_grad_norm_(1.0)


def test_a_step_of_an_optimizer_that_was_taken_is_refused() -> None:
    pipe, scaler = scaled()
    optimizer = optimizer_of(pipe.parameters())
    scaler.step(optimizer)
    with pytest.raises(penstock.RunError, match="must be stepped once per step"):
        scaler.step(optimizer)
    with pytest.raises(penstock.RunError, match="must be unscaled once per step"):
        scaler.unscale_(optimizer)


def test_scaled_gradients_are_not_added_to_unscaled_ones() -> None:
    pipe, scaler = scaled()
    optimizer = optimizer_of(pipe.parameters())
    scaler.unscale_(optimizer)
    with pytest.raises(penstock.RunError, match="unscaled gradients must be used before the next step"):
        pipe.step(X, target=TARGET)
    scaler.step(optimizer)
    scaler.update()
    pipe.step(X, target=TARGET)


def test_gradients_that_the_user_set_have_no_scale() -> None:
    scaler, model = penstock.GradScaler(SCALE), chain(4)
    plan = quick_plan(model, (X,), ranks=2, microbatches=2, schedule="1f1b")
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, scaler=scaler, local=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert float(pipe.clip_grad_norm_(1.0)) == pytest.approx(nn.utils.get_total_norm(torch.ones(80)).item())


STATES = [None, {}, {"scale": 1.0}, *({"scale": scale, "clean": 0, "skipped": 0} for scale in ("x", -1.0))]


@pytest.mark.parametrize("state", STATES)
def test_a_wrong_state_is_refused(state: Any) -> None:
    with pytest.raises(penstock.RunError, match=r"scale|state of a scaler"):
        penstock.GradScaler().load_state_dict(state)


def test_the_state_can_be_saved_and_loaded() -> None:
    scaler = penstock.GradScaler(8.0)
    other = penstock.GradScaler()
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict()


def test_only_an_optimizer_can_be_unscaled() -> None:
    with pytest.raises(penstock.RunError, match="optimizer must be a torch optimizer"):
        penstock.GradScaler().unscale_([])
