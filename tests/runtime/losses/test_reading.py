"""How a loss is divided is found for loss functions and for models that return their loss."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.capture import Microbatch, capture, microbatch_sizes, split_batch
from penstock.errors import RunError
from penstock.ir import LossRule
from penstock.runtime import loss_of
from penstock.runtime.losses.given import given_rule
from penstock.runtime.losses.model_rule import read_model
from penstock.runtime.losses.reading import read_function
from penstock.runtime.weights import weights
from tests.runtime.test_weights import CLASSES, labels


def entropy(*args: Any, **kwargs: Any) -> Tensor:
    return functional.cross_entropy(*args, **kwargs)


def flat(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    return entropy(logits.flatten(0, 1), target.flatten(), **options)


def shifted(logits: Tensor, target: Tensor) -> Tensor:
    return entropy(logits[:, :-1].reshape(-1, 5), target[:, 1:].reshape(-1))


def by_sizes(logits: Tensor, target: Tensor) -> Tensor:
    rows, length = target.shape
    return entropy(logits.reshape(rows * length, 5), target.reshape(rows * length))


def masked(logits: Tensor, target: Tensor) -> Tensor:
    mask = target != -100
    return (flat(logits, target.clamp(min=0), reduction="none").view_as(mask) * mask).sum() / mask.sum()


def read(logits: Tensor, target: Tensor) -> Tensor:
    return flat(logits, target, reduction="sum") / (target != -100).sum().item()


def chosen(logits: Tensor, target: Tensor) -> Tensor:
    return (logits[target != -100] ** 2).mean()


def printing(logits: Tensor, target: Tensor) -> Tensor:
    print(f"{logits.sum().item():.1f}"[:0], end="")
    return flat(logits, target)


def closing_over(classes: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda y, t: 0.5 * flat(y, t, weight=classes)


class Weighted(nn.Module):
    """A loss of a user's own, with a part."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.CrossEntropyLoss(weight=CLASSES)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """A multiple of the part."""
        return 3 * self.part(logits.transpose(1, 2), target)


class Criterion:
    """A loss that is an object with a tensor in it."""

    def __init__(self) -> None:
        self.own = CLASSES.clone()

    def __call__(self, logits: Tensor, target: Tensor) -> Tensor:
        """Class weights of its own."""
        return flat(logits, target, weight=self.own)


Loss = Callable[[Any, Any], Tensor]
LOSSES: dict[str, tuple[str, Loss]] = {
    "a function": ("tokens", flat),
    "a function with a shift": ("tokens", shifted),
    "a function that looks at sizes": ("tokens", by_sizes),
    "a partial": ("tokens", functools.partial(flat, ignore_index=-100, weight=CLASSES)),
    "a closure": ("tokens", closing_over(CLASSES.clone())),
    "a global tensor": ("tokens", lambda y, t: flat(y, t, weight=CLASSES)),
    "a module": ("tokens", Weighted()),
    "a method": ("tokens", Weighted().forward),
    "an object": ("tokens", Criterion()),
    "label smoothing": ("tokens", functools.partial(flat, label_smoothing=0.2)),
    "a mask": ("tokens", masked),
    "a count that is read": ("tokens", read),
    "chosen rows": ("tokens", chosen),
    "a function that prints": ("tokens", printing),
    "a sum of two": ("tokens", lambda y, t: flat(y, t) + 0.1 * flat(2 * y, t)),
    "squares": ("mean", lambda y, t: functional.mse_loss(y, (t % 5).unsqueeze(-1).expand_as(y).to(y.dtype))),
    "a mean": ("mean", lambda y, t: (y**2).mean()),
    "a sum": ("sum", functools.partial(flat, reduction="sum")),
    "a sum over a number": ("sum", lambda y, t: (y**2).sum() / 7),
    "a sum over its size": ("mean", lambda y, t: (y**2).sum() / len(y)),
    "rows chosen by their numbers": ("tokens", lambda y, t: (y[(t != -100).nonzero(as_tuple=True)[0]] ** 2).mean()),
    "rows selected": ("tokens", lambda y, t: y.flatten(0, 1).index_select(0, kept(t)).square().mean()),
    "a mean over a share": ("tokens", lambda y, t: (y.mean(-1) * (t >= 0)).mean() / (t >= 0).double().mean()),
    "weighted squares": ("tokens", lambda y, t: functional.mse_loss(y, y.detach() + 1, weight=entries(t))),
}


def kept(target: Tensor) -> Tensor:
    return (target.flatten() != -100).nonzero().squeeze(1)


def entries(target: Tensor) -> Tensor:
    return (target.clamp(min=0) + 1.0).double().unsqueeze(-1).expand(-1, -1, 5)


def logits() -> Tensor:
    return torch.randn(7, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()


def in_microbatches(loss_fn: Loss, y: Tensor, target: Tensor, num_microbatches: int) -> tuple[LossRule, Tensor]:
    """The rule of a loss function and the sum of its weighted gradients."""
    sizes = microbatch_sizes(len(y), num_microbatches)
    parts = [Microbatch((), {}, part, len(part)) for part in target.split(sizes)]
    reading = read_function(loss_fn, y.split(sizes)[0], parts[0].target, sizes[0])
    rule, found = reading.rule, torch.zeros_like(y)
    counts = [reading.counter(part) for part in parts]
    for part, piece, weight in zip(parts, y.split(sizes), weights(rule, counts), strict=True):
        if weight:
            found += torch.autograd.grad(loss_fn(piece, part.target) * weight, y, retain_graph=True)[0]
    return rule, found


@pytest.mark.parametrize("num_microbatches", [2, 3, 7])
@pytest.mark.parametrize("name", LOSSES)
def test_weighted_gradients_of_a_loss_function_sum_to_those_of_the_batch(name: str, num_microbatches: int) -> None:
    kind, loss_fn = LOSSES[name]
    y, target = logits(), labels()
    (expected,) = torch.autograd.grad(loss_fn(y, target), y)
    rule, found = in_microbatches(loss_fn, y, target, num_microbatches)
    assert rule.kind == kind
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


def by_numpy(y: Tensor, target: Tensor) -> Tensor:
    weight = torch.from_numpy(np.linspace(0, 1, len(y)))
    return (y.mean((1, 2)) * weight).mean()


def failing(y: Tensor, target: Tensor) -> Tensor:
    raise TypeError("not today")


@pytest.mark.parametrize("loss_fn", [by_numpy, failing, lambda y, t: "text", lambda y, t: y.logsumexp((0, 1, 2))])
def test_a_loss_function_that_cannot_be_looked_into_counts_samples(loss_fn: Loss) -> None:
    reading = read_function(loss_fn, torch.randn(3, 6, 5), labels()[:3], 3)
    assert reading.rule.kind == "unknown"
    assert reading.counter(Microbatch((), {}, labels()[:2], 2)) == (2.0,)


def test_finding_the_rule_leaves_gradients_random_numbers_and_the_output_alone() -> None:
    y, state, calls = logits(), torch.get_rng_state(), []

    def counted(output: Tensor, target: Tensor) -> Tensor:
        calls.append(output.requires_grad)
        return flat(functional.dropout(output), target)

    assert read_function(counted, y, labels(), 7).rule.kind == "tokens"
    assert (len(calls), y.grad, torch.equal(torch.get_rng_state(), state)) == (2, None, True)


def test_structures_are_allowed_as_output_and_target() -> None:
    def loss_fn(output: dict[str, Tensor], target: tuple[Tensor, int]) -> Tensor:
        return flat(output["logits"], target[0])

    y, target = logits(), labels()
    reading = read_function(loss_fn, {"logits": y[:3], "more": None}, (target[:3], 1), 3)
    assert (reading.rule.kind, reading.counter(Microbatch((), {}, (target[3:5], 1), 2))) == ("tokens", (3.0,))


class Language(nn.Module):
    """A model that returns its loss, in one of several forms."""

    def __init__(self, form: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.embed, self.head, self.form = nn.Embedding(9, 4), nn.Linear(4, 5), form

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        """The loss of the next label."""
        logits = self.head(self.embed(ids))
        return self.form(entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits)


FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "alone": lambda loss, y: loss,
    "first": lambda loss, y: (loss, y),
    "named": lambda loss, y: {"logits": y, "loss": loss},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_microbatches", [2, 3, 7])
def test_weighted_gradients_of_a_model_with_a_loss_sum_to_those_of_the_batch(form: str, num_microbatches: int) -> None:
    torch.manual_seed(0)
    model = Language(FORMS[form]).double()
    kwargs = {"ids": torch.randint(0, 9, (7, 6)), "labels": labels()}
    parameters = list(model.parameters())
    expected = torch.autograd.grad(loss_of(model(**kwargs)), parameters)
    pieces = split_batch(model.forward, (), kwargs, None, num_microbatches)
    captured = capture(model, (), pieces[0].kwargs)
    reading = read_model(captured, captured.first)
    found = [torch.zeros_like(parameter) for parameter in parameters]
    counts = [reading.counter(piece) for piece in pieces]
    for piece, weight in zip(pieces, weights(reading.rule, counts), strict=True):
        if weight:
            for total, part in zip(
                found, torch.autograd.grad(loss_of(model(**piece.kwargs)) * weight, parameters), strict=True
            ):
                total += part
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)


def test_a_model_without_a_loss_is_told_what_it_returned_and_what_to_do() -> None:
    model = Language(lambda loss, y: {"logits": y})
    captured = capture(model, (torch.zeros(2, 6).long(), labels()[:2]))
    with pytest.raises(RunError, match=r"no loss \(returned: dict\(logits=tensor\[2, 6, 5\]\)\)\ntry: loss_fn="):
        read_model(captured, captured.first)
    with pytest.raises(RunError, match=r"returned: tuple\(tensor\[3\], int\)"):
        loss_of((torch.zeros(3), 1))


def test_the_user_may_know_better() -> None:
    read = read_function(lambda y, t: (y**2).mean(), logits(), labels(), 7)
    rule, counter = read.rule, read.counter
    piece = Microbatch((), {}, labels()[:2], 2)
    assert given_rule("sum", rule, counter)[0].kind == "sum"
    tokens, labels_of = given_rule("tokens", rule, counter)
    assert (tokens.kind, labels_of(piece)) == ("tokens", (11.0,))
    assert labels_of(Microbatch((), {"labels": labels()[:2]}, None, 2)) == (11.0,)
    with pytest.raises(RunError, match="finds no labels"):
        labels_of(Microbatch((), {}, torch.zeros(2), 2))
    with pytest.raises(RunError, match=r"unknown reduction \(reduction: 'total'\)"):
        given_rule("total", rule, counter)
    found = read_function(flat, logits(), labels(), 7)
    assert given_rule("tokens", found.rule, found.counter) == (found.rule, found.counter)
