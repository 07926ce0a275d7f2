"""A step that fails half way leaves the gradients as they were before it, also those of earlier steps."""

import os
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock
from penstock.launch import StatusFile, shared_status_directory
from tests.parity import Values, assert_identical
from tests.plans import quick_plan
from tests.process_pool import Pools
from tests.selection import covered
from tests.small_models import WIDTH, Block, noise, seeded, tied, tokens

X, TARGET = noise(8, WIDTH), noise(8, WIDTH, seed=1)
SCHEDULES = ("gpipe", "1f1b", "zb_h1", "zbv")


class Failing(torch.autograd.Function):
    """Returns its input; one of its calls can be made to fail, in forward or backward."""

    left: dict[str, int]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """As it is."""
        count("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """As it is."""
        count("backward")
        return grad.clone()


def count(way: str) -> None:
    Failing.left[way] = Failing.left.get(way, 0) - 1
    if Failing.left[way] == 0:
        raise ValueError("not today")


def fail(**numbers: int) -> None:
    """Let these calls of "forward", "backward" or "loss" fail, from now on counted from 1."""
    Failing.left = numbers


class Fragile(Block):
    """A block with a fault."""

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        return Failing.apply(super().forward(x))


def fragile(place: int) -> nn.Module:
    fail()
    return seeded(nn.Sequential(*(Fragile() if index == place else Block() for index in range(4))))


def pipe_of(model: nn.Module, schedule: str = "1f1b", **given: Any) -> Any:
    plan = quick_plan(model, (X,), ranks=2, microbatches=4, schedule=schedule)
    given = {"loss_fn": mse_loss, "local": True, **given}
    return penstock.Pipeline(model, plan, **given)


def gradients(held: Any) -> Values:
    found = {name: parameter.grad for name, parameter in held.named_parameters()}
    return {name: None if gradient is None else gradient.clone() for name, gradient in found.items()}


def after_failure(pipe: Any, break_it: Callable[[], None], num_before: int) -> tuple[Values, Values]:
    """The gradients before and after a step that fails."""
    for _ in range(num_before):
        pipe.step(X, target=TARGET)
    before = gradients(pipe)
    break_it()
    with pytest.raises(penstock.RunError, match="not today"):
        pipe.step(X, target=TARGET)
    return before, gradients(pipe)


CALLS = (("forward", 3), ("backward", 1), ("backward", 4))


@pytest.mark.parametrize(
    ("schedule", "place", "call", "num_before"), covered(list(product(SCHEDULES, (0, 3), CALLS, (0, 2))))
)
def test_a_failed_step_restores_gradients(schedule: str, place: int, call: tuple[str, int], num_before: int) -> None:
    before, after = after_failure(pipe_of(fragile(place), schedule), lambda: fail(**dict([call])), num_before)
    assert_identical(after, before)
    assert all(gradient is None for gradient in after.values()) is (num_before == 0)


def test_a_loss_function_that_fails_leaves_no_trace() -> None:
    bad = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if any(torch.equal(target, one) for one in bad):
            raise ValueError("not today")
        return mse_loss(output, target)

    pipe = pipe_of(fragile(0), loss_fn=loss_fn)
    before, after = after_failure(pipe, lambda: bad.append(TARGET[4:6]), 1)
    assert_identical(after, before)


def test_the_step_after_a_failed_one_accumulates_into_restored_gradients() -> None:
    pipe, plain = pipe_of(fragile(3)), pipe_of(fragile(3))
    after_failure(pipe, lambda: fail(backward=3), 1)
    pipe.num_steps = plain.num_steps = 1
    fail()
    pipe.step(X, target=TARGET)
    for _ in range(2):
        plain.step(X, target=TARGET)
    assert_identical(gradients(pipe), gradients(plain))


def test_a_gradient_stays_the_same_tensor() -> None:
    """As in plain training, so that flat buffers of gradients stay what they are."""
    model = fragile(3)
    pipe = pipe_of(model)
    pipe.step(X, target=TARGET)
    held = [parameter.grad for parameter in model.parameters()]
    fail(backward=2)
    with pytest.raises(penstock.RunError):
        pipe.step(X, target=TARGET)
    fail()
    pipe.step(X, target=TARGET)
    assert all(parameter.grad is gradient for parameter, gradient in zip(model.parameters(), held, strict=True))


def test_accumulation_has_every_bit_of_the_plain_loop() -> None:
    model, plain = fragile(0), fragile(0)
    pipe = pipe_of(model)
    for _ in range(3):
        pipe.step(X, target=TARGET)
        for x, target in zip(X.split(2), TARGET.split(2), strict=True):
            (mse_loss(plain(x), target) * 0.25).backward()
    assert_identical(gradients(model), gradients(plain))


def test_without_restoring_a_step_that_fails_drops_all_gradients() -> None:
    pipe = pipe_of(fragile(3), options=penstock.RunOptions(restore_gradients=False))
    _, after = after_failure(pipe, lambda: fail(backward=3), 1)
    assert set(after.values()) == {None}


def failing_loss(output: Tensor, target: Tensor) -> Tensor:
    count("loss")
    return mse_loss(output, target)


FAILURES = ({"forward": 1}, {"backward": 3}, {"loss": 1}, {"forward": 2, "backward": 1}, {"forward": 4})


def continuing(transport: str, schedule: str) -> tuple[list[str], list[str], list[float], Values, Values]:
    """Steps that fail on one rank, each caught; the errors, later losses, and gradients before and after.

    Also the last sync of a failed step and of a failed evaluation.
    """
    model = fragile(3 if transport == "shared" else 0)
    options = penstock.RunOptions(transport=transport)
    pipe = pipe_of(model, schedule, local=False, loss_fn=failing_loss, options=options)
    pipe.step(X, target=TARGET)
    before, errors = gradients(pipe), []
    for failure in FAILURES:
        fail(**failure)
        with pytest.raises(penstock.RunError) as caught:
            pipe.step(X, target=TARGET)
        errors.append(str(caught.value))
    after, syncs = gradients(pipe), [last_sync()]
    fail(loss=1)
    with pytest.raises(penstock.RunError, match="not today"):
        pipe.evaluate(X, target=TARGET)
    syncs.append(last_sync())
    fail()
    losses = [float(pipe.step(X, target=TARGET).loss), float(pipe.evaluate(X, target=TARGET).loss)]
    return errors, syncs, losses, before, after


def last_sync() -> str:
    """The last sync in the status file of this rank."""
    status = StatusFile.read(shared_status_directory())[dist.get_rank()]
    return [entry.sync_point for entry in status.recent if entry.sync_point][-1]


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("transport", "schedule"),
    # In dualpipe_v passes overlap: if the first of a pair fails, the messages of the second have yet to be received.
    [("shared", "zbv"), ("distributed", "1f1b"), ("shared", "dualpipe_v"), ("distributed", "dualpipe_v")],
)
def test_all_ranks_raise_the_error_of_one_and_can_take_the_next_step(
    pools: Pools, transport: str, schedule: str
) -> None:
    expected = float(mse_loss(fragile(0)(X), TARGET).detach())
    results = pools[2].run(continuing, transport, schedule)
    assert results[0][0] == results[1][0]
    for errors, syncs, losses, before, after in results:
        assert all("ValueError: not today (step: 1, rank: " in error for error in errors)
        assert syncs == ["the end of step 1", "the end of eval before step 1"]
        assert_identical(after, before)
        assert losses == [pytest.approx(expected, rel=1e-12)] * 2


def interrupted(transport: str) -> tuple[str, str, Values, Values]:
    """The errors of the step after an interrupt, and of a new Pipeline; gradients before and after the interrupt."""
    os.environ["PENSTOCK_WATCH"] = "0"
    rank, is_interrupted = dist.get_rank(), []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if is_interrupted:
            raise KeyboardInterrupt
        return mse_loss(output, target)

    # Over gloo, the other rank waits until the deadline, which must be longer than any wait of a good step.
    options = penstock.RunOptions(deadline_seconds=6.0, transport=transport)
    pipe = pipe_of(fragile(0), local=False, loss_fn=loss_fn, options=options)
    pipe.step(X, target=TARGET)
    before = gradients(pipe)
    is_interrupted.append(True)
    with pytest.raises(KeyboardInterrupt if rank else penstock.RunError):
        pipe.step(X, target=TARGET)
    after = gradients(pipe)
    is_interrupted.clear()
    with pytest.raises(penstock.RunError) as caught:
        pipe.step(X, target=TARGET)
    try:
        pipe = pipe_of(fragile(0), local=False, loss_fn=loss_fn, options=options)
        return str(caught.value), str(float(pipe.step(X, target=TARGET).loss)), before, after
    except penstock.RunError as error:
        return str(caught.value), str(error), before, after


@pytest.mark.xdist_group("gloo")
def test_after_an_interrupt_the_next_step_asks_for_a_new_pipeline() -> None:
    expected = float(mse_loss(fragile(0)(X), TARGET).detach())
    for error, loss, before, after in penstock.launch(interrupted, 2, "shared"):
        assert error.startswith("a Pipeline cannot continue after a step that was interrupted or lost contact")
        assert "try: a new Pipeline on every rank" in error
        assert float(loss) == pytest.approx(expected, rel=1e-12)
        assert_identical(after, before)


@pytest.mark.xdist_group("gloo")
def test_a_process_group_with_messages_of_an_interrupted_step_is_refused() -> None:
    for error, problem, _, _ in penstock.launch(interrupted, 2, "distributed"):
        assert "start the processes again" in error
        assert problem.startswith("messages of a step that was interrupted may still arrive in this process group")


def tied_and_broken() -> tuple[Values, Values, Values]:
    """The gradients after a good step, after one that is refused, and after one more good step."""
    model, x = tied(), tokens(6, 5)
    plan = quick_plan(model, (x,), ranks=2, microbatches=3, schedule="1f1b")
    pipe = penstock.Pipeline(model, plan, loss_fn=scores)
    pipe.step(x, target=x)
    found = [gradients(pipe)]
    hook = model.blocks[1].register_forward_hook(lambda module, given, result: result * float("nan"))
    with pytest.raises(penstock.RunError, match="is NaN or Inf"):
        pipe.step(x, target=x)
    hook.remove()
    found.append(gradients(pipe))
    pipe.step(x, target=x)
    return (*found, gradients(pipe))


def scores(output: Tensor, target: Tensor) -> Tensor:
    return (output**2).mean()


@pytest.mark.gloo
def test_gradients_of_tied_parameters_are_restored(pools: Pools) -> None:
    for before, after, more in pools[2].run(tied_and_broken):
        assert_identical(after, before)
        for name, gradient in more.items():
            assert torch.allclose(gradient, 2 * before[name], rtol=1e-12, atol=0)
