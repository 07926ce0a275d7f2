"""The weights of loss functions that change from step to step, and how often they are evaluated for that."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock
from tests.loss.table import ALL, CLASSES, LABELS, PLACES, SAMPLES, VALUES, WEIGHTS, flat, numbers
from tests.plans import quick_plan

X = numbers(SAMPLES, PLACES, 4, seed=0)


class Epoch:
    """What a training loop counts."""

    number = 0


@pytest.fixture(autouse=True)
def _from_the_beginning() -> None:
    Epoch.number = 0


def annealed(y: Tensor, t: Tensor) -> Tensor:
    return functional.mse_loss(y, t, reduction="mean" if Epoch.number < 2 else "sum")


def other_ignored(y: Tensor, t: Tensor) -> Tensor:
    return flat(y, t, ignore_index=0 if Epoch.number < 2 else 1)


def growing_weights(y: Tensor, t: Tensor) -> Tensor:
    return flat(y, t, weight=torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0 + 3 * Epoch.number], dtype=torch.float64))


def growing_threshold(y: Tensor, t: Tensor) -> Tensor:
    mask = t > 0.2 * Epoch.number
    return ((y - t).square() * mask).sum() / mask.sum()


def chosen_by_threshold(y: Tensor, t: Tensor) -> Tensor:
    return (y - t)[t > 0.2 * Epoch.number].square().mean()


class Replaced:
    """Class weights that are another tensor after a while."""

    def __call__(self, y: Tensor, t: Tensor) -> Tensor:
        """The mean over labels."""
        self.weights = WEIGHTS if Epoch.number < 2 else WEIGHTS.flip(0)
        return flat(y, t, weight=self.weights)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()


def pipeline(loss_fn: Any, microbatches: int = 3, **options: Any) -> tuple[nn.Module, penstock.Pipeline]:
    own = model()
    plan = quick_plan(own, (X,), ranks=2, microbatches=microbatches, schedule="1f1b")
    return own, penstock.Pipeline(own, plan, loss_fn=loss_fn, local=True, **options)


@pytest.mark.parametrize(
    ("loss_fn", "target"),
    [
        (annealed, VALUES),
        (other_ignored, ALL),
        (growing_weights, LABELS),
        (growing_threshold, VALUES),
        (chosen_by_threshold, VALUES),
        (Replaced(), LABELS),
    ],
)
def test_every_step_has_the_gradients_of_the_whole_batch(loss_fn: Any, target: Tensor) -> None:
    own, pipe = pipeline(loss_fn)
    plain = copy.deepcopy(own)
    for Epoch.number in range(5):
        own.zero_grad()
        plain.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = pipe.step(X, target=target).loss
        expected = loss_fn(plain(X), target)
        expected.backward()
        torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=0)
        for one, other in zip(own.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-11, atol=1e-14)


def test_counts_that_change_are_right_on_single_samples_too() -> None:
    own, pipe = pipeline(growing_threshold, SAMPLES)
    for Epoch.number in range(5):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = pipe.step(X, target=VALUES).loss
        torch.testing.assert_close(found, growing_threshold(own(X), VALUES).detach(), rtol=1e-12, atol=0)


def test_samples_that_begin_to_interact_cause_a_warning_in_that_step() -> None:
    _, pipe = pipeline(lambda y, t: functional.mse_loss(y - y.mean(0) if Epoch.number else y, t))
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pipe.step(X, target=VALUES)
    Epoch.number = 1
    with pytest.warns(UserWarning, match="not a weighted sum of the losses"):
        pipe.step(X, target=VALUES)


def test_samples_that_begin_to_interact_are_noticed_by_microbatches_that_differ() -> None:
    labels = ALL.clamp(max=CLASSES - 2)
    # The samples with the extreme labels, with which a reduction is checked, have equal numbers of labels.
    labels[[0, 3], :5] = -100
    labels[3, 5] = CLASSES - 1

    def loss_fn(y: Tensor, t: Tensor) -> Tensor:
        return flat(y, t) + Epoch.number * y.square().mean()

    _, pipe = pipeline(loss_fn, SAMPLES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            pipe.step(X, target=labels)
    Epoch.number = 1
    with pytest.warns(UserWarning, match="not a weighted sum of the losses"):
        pipe.step(X, target=labels)


@pytest.mark.parametrize("limit", [1 << 20, CLASSES * PLACES // 2])
def test_a_mean_over_positive_outputs_causes_a_warning_in_the_first_step(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.loss.step_weights.LARGE", limit)
    _, pipe = pipeline(lambda y, t: (y - t)[y > 0].square().mean(), SAMPLES)
    with pytest.warns(UserWarning, match="not a weighted sum of the losses"):
        pipe.step(X, target=VALUES)


def test_the_loss_of_the_worst_sample_causes_a_warning_even_if_its_target_makes_it_the_worst() -> None:
    _, pipe = pipeline(lambda y, t: (y - t).square().mean((1, 2)).max())
    with pytest.warns(UserWarning, match="not a weighted sum of the losses"):
        pipe.step(X, target=VALUES * torch.arange(SAMPLES).view(-1, 1, 1))


def test_a_batch_without_labels_has_the_loss_of_the_whole_batch() -> None:
    _, pipe = pipeline(lambda y, t: flat(y, t, reduction="sum") / (t != -100).sum().clamp(min=1))
    for target in (LABELS, LABELS, torch.full_like(LABELS, -100)):
        found = pipe.step(X, target=target).loss
    assert found == 0.0


def test_a_function_that_depends_on_the_number_of_samples_is_right() -> None:
    def by_size(y: Tensor, t: Tensor) -> Tensor:
        return functional.mse_loss(y, t, reduction="sum" if len(y) == 2 else "mean")

    own, pipe = pipeline(by_size)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = pipe.step(X, target=VALUES).loss
    torch.testing.assert_close(found, by_size(own(X), VALUES).detach(), rtol=1e-12, atol=0)


def test_a_function_that_is_another_one_for_some_microbatches_causes_a_warning_and_samples_count() -> None:
    def by_size(y: Tensor, t: Tensor) -> Tensor:
        return functional.mse_loss(y, t) + y.square().mean() if len(y) == 2 else (y - t)[t > 0].square().mean()

    _, pipe = pipeline(by_size)
    with pytest.warns(UserWarning, match="not a weighted sum of the losses"):
        assert pipe.step(X, target=VALUES).weights == pytest.approx((3 / 7, 2 / 7, 2 / 7))


def counting(loss_fn: Callable[[Any, Any], Tensor]) -> tuple[list[bool], Callable[[Any, Any], Tensor]]:
    calls: list[bool] = []

    def called(y: Tensor, t: Tensor) -> Tensor:
        calls.append(True)
        return loss_fn(y, t)

    return calls, called


def test_the_first_step_evaluates_a_function_twice_on_everything_and_later_steps_on_two_microbatches() -> None:
    calls, loss_fn = counting(functional.mse_loss)
    _, pipe = pipeline(loss_fn)
    found = []
    for _ in range(9):
        before = len(calls)
        pipe.step(X, target=VALUES)
        pipe.eval(X, target=VALUES)
        found.append(len(calls) - before - 6)
    assert found == [14, 6, 2, 6, 2, 2, 2, 6, 2]


def test_samples_with_large_outputs_are_compared_on_their_first_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.loss.step_weights.LARGE", CLASSES)
    lengths: list[int] = []

    def loss_fn(y: Tensor, t: Tensor) -> Tensor:
        lengths.append(y.shape[1])
        return functional.mse_loss(y, t)

    _, pipe = pipeline(loss_fn)
    for _ in range(3):
        lengths.clear()
        pipe.step(X, target=VALUES)
    assert sorted(lengths) == [2, 2, 2, X.shape[1], X.shape[1], X.shape[1]]


def test_a_function_whose_weights_cannot_be_counted_is_evaluated_in_every_step() -> None:
    calls, loss_fn = counting(lambda y, t: flat(y, t, weight=WEIGHTS))
    _, pipe = pipeline(loss_fn)
    for _ in range(3):
        pipe.step(X, target=LABELS)
    assert len(calls) == 3 * 3 + 8 + 2 * 4


def test_one_microbatch_or_a_reduction_that_is_given_needs_no_evaluation() -> None:
    calls, loss_fn = counting(functional.mse_loss)
    _, pipe = pipeline(loss_fn, reduction="sum")
    _, whole = pipeline(loss_fn, microbatches=1)
    for _ in range(2):
        pipe.step(X, target=VALUES)
        whole.step(X, target=VALUES)
    assert len(calls) == 2 * 3 + 2


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda y, t: functional.mse_loss(functional.dropout(y, 0.5), t, reduction="sum"),
        lambda y, t: torch.einsum("bij,bij->", functional.dropout(y), t),
        lambda y, t: ((y - t) * torch.rand_like(y)).square().sum(),
    ],
)
def test_the_weights_of_a_random_loss_are_found(loss_fn: Any) -> None:
    _, pipe = pipeline(loss_fn)
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pipe.step(X, target=VALUES).weights == (1.0, 1.0, 1.0)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_random_loss_may_write_into_its_target() -> None:
    def written(y: Tensor, t: Tensor) -> Tensor:
        return (y - t.add_(1.0)).square().mean() * (1 + torch.rand((), dtype=y.dtype))

    _, pipe = pipeline(written)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pipe.step(X, target=VALUES.clone()).weights == pytest.approx([3 / 7, 2 / 7, 2 / 7])


class Moving(nn.Module):
    """A loss with a centre that follows the outputs, and a count of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(PLACES, CLASSES, dtype=torch.float64))
        self.calls = 0

    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        """Squares around the centre."""
        loss = (y - t - self.centre).square().mean()
        self.centre.lerp_(y.detach().mean(0), 0.1)
        self.calls += 1
        return loss


def test_evaluations_leave_no_trace() -> None:
    own, pipe = pipeline(loss_fn := Moving())
    plain = Moving()
    for part in X.split((3, 2, 2)):
        plain(own(part).detach(), torch.zeros(len(part), PLACES, CLASSES, dtype=torch.float64))
    pipe.step(X, target=torch.zeros_like(VALUES))
    assert loss_fn.calls == 3
    torch.testing.assert_close(loss_fn.centre, plain.centre, rtol=1e-12, atol=1e-15)


def test_a_function_may_write_into_its_arguments() -> None:
    own, pipe = pipeline(lambda y, t: (y.sub_(t)).square().mean() + 0 * t.add_(1).mean())
    target = VALUES.clone()
    found = pipe.step(X, target=target).loss
    assert torch.equal(target, VALUES + 1)
    torch.testing.assert_close(found, functional.mse_loss(own(X), VALUES).detach(), rtol=1e-12, atol=0)


class Structured(nn.Module):
    """Returns a dict whose scores have the tokens of all samples in one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 6), nn.Linear(6, CLASSES)]).double()

    def forward(self, x: Tensor) -> dict[str, Any]:
        """Scores of tokens, and something else."""
        first, second = self.layers
        return {"scores": second(first(x)).flatten(0, 1), "more": (None, 3)}


@pytest.mark.parametrize("microbatches", [3, SAMPLES])
def test_structures_are_allowed_as_output_and_target(microbatches: int) -> None:
    def loss_fn(output: dict[str, Any], target: tuple[Tensor, int]) -> Tensor:
        return functional.cross_entropy(output["scores"], target[0].flatten())

    own, target = Structured(), (LABELS, 1)
    plan = quick_plan(own, (X,), ranks=2, microbatches=microbatches, schedule="1f1b")
    pipe = penstock.Pipeline(own, plan, loss_fn=loss_fn, local=True)
    for _ in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = pipe.step(X, target=target).loss
        torch.testing.assert_close(found, loss_fn(own(X), target).detach(), rtol=1e-12, atol=0)


def test_a_loss_of_a_value_without_samples_causes_a_warning() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 6), nn.Linear(6, CLASSES)]).double()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            first, second = self.layers
            y = second(first(x))
            return y, y.square().mean()

    own = Pair()
    plan = quick_plan(own, (X,), ranks=2, microbatches=3, schedule="1f1b")
    pipe = penstock.Pipeline(own, plan, loss_fn=lambda y, t: functional.mse_loss(y[0], t) + y[1], local=True)
    with pytest.warns(UserWarning, match="an output of the model that has no batch dimension"):
        pipe.step(X, target=VALUES)


def test_padding_under_another_label_that_comes_later_is_noticed() -> None:
    own, pipe = pipeline(lambda y, t: flat(y, t, ignore_index=0))
    targets = [ALL.clamp(min=1), ALL.clamp(min=1), ALL.clamp(min=1).clone(), ALL.clamp(min=1).roll(1, 0)]
    targets[2][1, 2:] = 0
    targets[3][4:, 3:] = 0
    for target in targets:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = pipe.step(X, target=target).loss
        torch.testing.assert_close(found, flat(own(X), target, ignore_index=0).detach(), rtol=1e-12, atol=0)


def test_real_outputs_of_a_function_that_takes_float32_only_are_compared() -> None:
    """Its mean over positive outputs is found by comparing microbatches, which must not need float64."""
    x = torch.randn(6, 4)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, CLASSES))
    plan = quick_plan(model, (x,), ranks=2, microbatches=3, schedule="1f1b")
    matrix = torch.eye(CLASSES)

    def loss_fn(y: Tensor, t: Tensor) -> Tensor:
        return ((y - t) @ matrix)[y > 0].square().mean()

    pipe = penstock.Pipeline(model, plan, loss_fn=loss_fn, local=True)
    with pytest.warns(UserWarning, match="not a weighted sum of the losses"):
        pipe.step(x, target=torch.randn(6, CLASSES))


def test_class_weights_in_float32_are_exact_for_outputs_of_lower_precision() -> None:
    """Autocast converts the outputs to float32, but it converts nothing to double precision."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, CLASSES))
    x, labels = torch.randn(6, 4), torch.tensor([0, 1, -100, -100, 3, 4])
    plan = quick_plan(model, (x,), ranks=2, microbatches=3, schedule="1f1b")
    loss_fn = nn.CrossEntropyLoss(weight=WEIGHTS.float())
    pipe = penstock.Pipeline(model, plan, loss_fn=loss_fn, local=True)
    with warnings.catch_warnings(action="error"), torch.autocast("cpu", torch.bfloat16):
        loss, expected = pipe.step(x, target=labels).loss, loss_fn(model(x), labels)
    torch.testing.assert_close(loss, expected.detach())


def test_a_first_microbatch_without_labels_is_no_obstacle() -> None:
    target = LABELS.flip(0)
    own, pipe = pipeline(lambda y, t: flat(y, t), SAMPLES)
    plain = copy.deepcopy(own)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = pipe.step(X, target=target).loss
    torch.testing.assert_close(found, flat(plain(X), target).detach(), rtol=1e-12, atol=0)


class Fused(torch.autograd.Function):
    """Cross entropy that shows nothing of itself, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean over labels that are not ignored."""
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            loss = flat(leaf, labels)
        (ctx.gradient,) = torch.autograd.grad(loss, leaf)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor, None]:
        """What was computed already."""
        return ctx.gradient * factor, None


def fused(y: Tensor, t: Tensor) -> Tensor:
    return Fused.apply(y, t)  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize("microbatches", [3, SAMPLES])
def test_labels_that_are_ignored_later_are_counted_by_a_function_that_shows_nothing(microbatches: int) -> None:
    own, pipe = pipeline(fused, microbatches)
    gaps = [ALL, ALL, ALL, ALL.clone(), LABELS.roll(1, 0)]
    gaps[3][-1, 2:] = -100
    for target in gaps:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = pipe.step(X, target=target).loss
        torch.testing.assert_close(found, flat(own(X), target).detach(), rtol=1e-12, atol=0)
