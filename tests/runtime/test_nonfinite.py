"""NaN and Inf are reported with step and stage and change no weight; a scaler decides for all ranks alike."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock
from tests.parity import Values, WholeModel, assert_close, assert_identical, values
from tests.plans import quick_plan
from tests.process_pool import Pools
from tests.small_models import WIDTH, Block, noise, seeded, tied, token_loss, tokens

X, TARGET = noise(6, WIDTH), noise(6, WIDTH, seed=1)


class Breaking(torch.autograd.Function):
    """Hands on its input, and makes what is marked infinite on the way there or back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        """As it is, or broken."""
        ctx.factor = backward
        return x * forward

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """As it is, or broken."""
        return grad * ctx.factor, None, None


class Fragile(nn.Module):
    """A chain that can produce NaN or Inf after one of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Breakable() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Blocks in a row."""
        for block in self.blocks:
            x = block(x)
        return x


class Breakable(Block):
    """A block with a fault that can be switched on."""

    forward_factor = backward_factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        return Breaking.apply(super().forward(x), self.forward_factor, self.backward_factor)


def fragile_pipe(local: bool = True, **options: Any) -> tuple[nn.Module, Any]:
    model = seeded(Fragile())
    plan = quick_plan(model, (X,), ranks=2, microbatches=3, schedule="1f1b", stages_per_rank=1)
    options = {"options": penstock.RunOptions(**options)} if options else {}
    return model, penstock.Pipeline(model, plan, loss_fn=mse_loss, local=local, **options)


def broken(model: nn.Module, block: int, during: str, factor: float = float("nan")) -> None:
    setattr(model.blocks[block], f"{during}_factor", factor)


def gradients_of(held: Any) -> Values:
    """Copies of the gradients by name."""
    found = {name: parameter.grad for name, parameter in held.named_parameters()}
    return {name: None if gradient is None else gradient.clone() for name, gradient in found.items()}


def refusal(pipe: Any) -> str:
    try:
        pipe.step(X, target=TARGET)
    except penstock.RunError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize(
    ("block", "during", "stage"), [(1, "forward", 0), (2, "forward", 1), (3, "forward", 1), (1, "backward", 0)]
)
def test_nonfinite_values_are_reported_with_step_and_stage(block: int, during: str, stage: int) -> None:
    model, pipe = fragile_pipe()
    pipe.step(X, target=TARGET)
    before = gradients_of(model)
    broken(model, block, during)
    words = refusal(pipe)
    assert words.startswith("loss or gradient is NaN or Inf")
    assert "step: 1" in words
    assert f"stage: {stage}, during: {during}" in words
    assert 'or nonfinite="skip" in RunOptions' in words
    assert_identical(gradients_of(model), before)


def test_skipping_is_not_suggested_if_the_weights_are_broken() -> None:
    model, pipe = fragile_pipe()
    model.blocks[1].linear.weight.data.fill_(float("nan"))
    words = refusal(pipe)
    assert "try: weights from before an earlier step broke them" in words
    assert "nonfinite=" not in words


class ToComplex(Breakable):
    """A block that returns complex numbers."""

    def forward(self, x: Tensor) -> Tensor:
        """The result of the block as the real part."""
        return torch.complex(super().forward(x), x)


class ToReal(Block):
    """A block that takes complex numbers."""

    def forward(self, x: Tensor) -> Tensor:
        """One layer on the real part."""
        return super().forward(x.real)


def test_nan_in_a_complex_output_is_found_in_the_stage_that_computed_it() -> None:
    model = seeded(nn.Sequential(ToComplex(), ToReal()))
    plan = quick_plan(model, (X,), ranks=2, microbatches=3, schedule="1f1b")
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, local=True)
    model[0].forward_factor = float("nan")
    assert "stage: 0, during: forward" in refusal(pipe)


def test_a_skipped_step_leaves_no_gradients_and_the_next_one_runs() -> None:
    model, pipe = fragile_pipe(nonfinite="skip")
    broken(model, 1, "forward")
    with pytest.warns(penstock.PenstockWarning, match="is NaN or Inf"):
        skipped = pipe.step(X, target=TARGET).skipped
    assert "stage: 0" in skipped
    assert 'nonfinite="skip"' not in skipped  # the hint of the error, which asks for what is done already
    assert all(parameter.grad is None for parameter in model.parameters())
    broken(model, 1, "forward", 1.0)
    assert pipe.step(X, target=TARGET).skipped == ""
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
def test_a_dropped_step_restores_the_gradient_of_its_input(nonfinite: str) -> None:
    model, pipe = fragile_pipe(nonfinite=nonfinite)
    new, used = X.clone().requires_grad_(), X.clone().requires_grad_()
    pipe.step(used, target=TARGET)
    gradient = used.grad
    before = gradient.clone()
    broken(model, 1, "backward")
    for x in (new, used):
        with pytest.warns(penstock.PenstockWarning) if nonfinite == "skip" else pytest.raises(penstock.RunError):
            pipe.step(x, target=TARGET)
    assert new.grad is None
    assert used.grad is gradient
    assert torch.equal(gradient, before)
    broken(model, 1, "backward", 1.0)
    pipe.step(used, target=TARGET)
    assert torch.equal(used.grad, before + before)


def test_with_the_check_off_the_loss_is_nan() -> None:
    model, pipe = fragile_pipe(nonfinite="ignore")
    broken(model, 1, "forward")
    assert torch.isnan(pipe.step(X, target=TARGET).loss)


def broken_on_a_rank(block: int, during: str) -> tuple[str, Values, str, Values, Values]:
    """The words, and what is held, for a step that is refused, and for one that is skipped after a good one."""
    model, pipe = fragile_pipe(local=False)
    broken(model, block, during)
    words, held = refusal(pipe), values(pipe)
    model, pipe = fragile_pipe(local=False, nonfinite="skip")
    pipe.step(X, target=TARGET)
    before = gradients_of(pipe)
    broken(model, block, during)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        skipped = pipe.step(X, target=TARGET).skipped
    return words, held, skipped, before, gradients_of(pipe)


@pytest.mark.gloo
@pytest.mark.parametrize(("block", "during", "stage"), [(0, "forward", 0), (3, "forward", 1), (1, "backward", 0)])
def test_every_process_refuses_and_skips_alike(pools: Pools, block: int, during: str, stage: int) -> None:
    first, second = pools[2].run(broken_on_a_rank, block, during)
    assert (first[0], first[2]) == (second[0], second[2])
    assert f"stage: {stage}, during: {during}" in first[0]
    weights = {f"state {name}": value for name, value in seeded(Fragile()).state_dict().items() if "linear" in name}
    held = first[1] | second[1]
    assert all(value is None for name, value in held.items() if name.startswith("gradient"))
    assert_identical({name: held[name] for name in weights}, weights)
    for _, _, _, before, after in (first, second):
        assert_identical(after, before)


def gradients_around_a_skip() -> tuple[Values, Values]:
    """The gradients after a good step, and after one more that was skipped, of a model with tied weights."""
    model, x = tied(), tokens(6, 5)
    plan = quick_plan(model, (x,), ranks=2, microbatches=3, schedule="1f1b")
    options = penstock.RunOptions(nonfinite="skip")
    pipe = penstock.Pipeline(model, plan, loss_fn=token_loss, options=options)
    pipe.step(x, target=x)
    before = gradients_of(pipe)
    model.blocks[1].register_forward_hook(lambda module, given, result: result * float("nan"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe.step(x, target=x)
    return before, gradients_of(pipe)


@pytest.mark.gloo
def test_a_skipped_step_keeps_the_gradients_of_earlier_ones_also_those_that_ranks_share(pools: Pools) -> None:
    for before, after in pools[2].run(gradients_around_a_skip):
        assert_identical(after, before)


def scaled_steps(local: bool = False) -> tuple[list[float], int, Values]:
    """Five steps of which the second overflows on rank 0 only: the scale after each, skipped steps, what is held."""
    scaler = penstock.GradScaler(init_scale=8.0, growth_interval=2)
    model = seeded(Fragile())
    plan = quick_plan(model, (X,), ranks=2, microbatches=3, schedule="1f1b")
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, scaler=scaler, local=local)
    optimizer, scales = torch.optim.SGD(pipe.parameters(), lr=0.1), []
    for step in range(5):
        optimizer.zero_grad()
        broken(model, 0, "backward", float("inf") if step == 1 else 1.0)
        pipe.step(X, target=TARGET)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.scale)
    return scales, scaler.skipped, values(pipe)


def plain_steps() -> Values:
    """The same four steps without a scaler."""
    model = seeded(Fragile())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        WholeModel(model, mse_loss).step(X, target=TARGET)
        optimizer.step()
    return values(model)


def without_counts(found: Values) -> Values:
    """The forward of a step that is skipped afterwards has seen its samples too."""
    return {name: value for name, value in found.items() if not name.endswith("seen")}


def test_a_scaler_skips_an_overflow_and_lowers_its_scale() -> None:
    scales, skipped, found = scaled_steps(local=True)
    assert scales == [8.0, 4.0, 4.0, 8.0, 8.0]
    assert skipped == 1
    assert_close(without_counts(found), without_counts(plain_steps()))


@pytest.mark.gloo
def test_every_process_skips_when_one_overflows(pools: Pools) -> None:
    first, second = pools[2].run(scaled_steps)
    assert first[:2] == second[:2] == ([8.0, 4.0, 4.0, 8.0, 8.0], 1)
    assert_close(without_counts(first[2] | second[2]), without_counts(plain_steps()))


def test_a_scaler_may_come_down_to_one_and_still_decides_itself() -> None:
    scaler = penstock.GradScaler(init_scale=1.0)
    model = seeded(Fragile())
    plan = quick_plan(model, (X,), ranks=2, microbatches=3, schedule="1f1b")
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, scaler=scaler, local=True)
    broken(model, 0, "backward")
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    assert pipe.step(X, target=TARGET).skipped == ""
    scaler.step(optimizer)
    assert scaler.skipped == 1
