"""The weighted gradients of microbatches sum to those of the batch."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from penstock.capture import microbatch_sizes
from penstock.errors import RunError
from penstock.ir import Count, LossRule, Term, TermKind, assumed, combined
from penstock.runtime.weights import count_labels, is_exact, term_weights, weighted_sum, weights

CLASSES = torch.tensor([0.5, 2.0, 1.0, 0.25, 3.0], dtype=torch.float64)
LABELS = Count("target")


def labels() -> Tensor:
    """Seven rows of six labels; ever more of them are ignored, all of them in two rows."""
    found = torch.randint(0, 5, (7, 6), generator=torch.Generator().manual_seed(1))
    for row in range(6):
        found[row, :row] = -100
    found[4:6] = -100
    return found


def token_mean(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.transpose(1, 2), target)


def weighted_token_mean(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.transpose(1, 2), target, weight=CLASSES)


def mean(logits: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(logits, torch.zeros_like(logits))


def total(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.transpose(1, 2), target, reduction="sum")


def at_least_one(logits: Tensor, target: Tensor) -> Tensor:
    return total(logits, target) / (target != -100).sum().clamp(min=1)


def a_little_more(logits: Tensor, target: Tensor) -> Tensor:
    return total(logits, target) / ((target != -100).sum() + 1e-8)


CASES: list[tuple[Callable[[Tensor, Tensor], Tensor], LossRule, Tensor | None]] = [
    (token_mean, assumed("tokens", count=LABELS), None),
    (weighted_token_mean, assumed("tokens", count=LABELS), CLASSES),
    (mean, assumed("mean"), None),
    (total, assumed("sum"), None),
    (at_least_one, assumed("tokens", count=Count("target", at_least=1.0)), None),
    (a_little_more, assumed("tokens", count=Count("target", plus=1e-8, dtype="float32")), None),
]


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize(("loss_fn", "rule", "classes"), CASES, ids=lambda case: getattr(case, "__name__", ""))
def test_weighted_gradients_sum_to_those_of_the_batch(
    loss_fn: Callable[[Tensor, Tensor], Tensor], rule: LossRule, classes: Tensor | None, num_microbatches: int
) -> None:
    logits = torch.randn(7, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    sizes, target = microbatch_sizes(7, num_microbatches), labels()
    whole = loss_fn(logits, target)
    (expected,) = torch.autograd.grad(whole, logits)
    parts = target.split(sizes)
    is_counted = rule.kind == "tokens"
    counts = [(count_labels(part, -100, classes) if is_counted else float(len(part)),) for part in parts]
    found, losses = torch.zeros_like(logits), []
    for part, piece, weight in zip(parts, logits.split(sizes), weights(rule, counts), strict=True):
        losses.append(loss_fn(piece, part))
        if weight:
            found += torch.autograd.grad(losses[-1] * weight, logits, retain_graph=True)[0]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(weighted_sum(losses, weights(rule, counts)), whole, rtol=1e-12, atol=0)


def test_a_microbatch_in_which_nothing_counts_has_weight_zero_and_no_say() -> None:
    found = weights(assumed("tokens", count=LABELS), [(3.0,), (0.0,), (1.0,)])
    assert found == (0.75, 0.0, 0.25)
    assert weighted_sum([torch.tensor(2.0), torch.tensor(math.nan), torch.tensor(6.0)], found) == 3.0


def test_a_batch_in_which_nothing_counts_has_a_loss_that_is_not_a_number() -> None:
    found = weights(assumed("tokens", count=LABELS), [(0.0,), (0.0,)])
    assert all(map(math.isnan, found))
    assert weighted_sum([torch.tensor(1.0), torch.tensor(1.0)], found).isnan()


@pytest.mark.parametrize(
    ("kinds", "counts", "expected"),
    [
        (("tokens", "mean"), [(4.0, 2.0), (2.0, 1.0)], True),
        (("tokens", "mean"), [(4.0, 2.0), (4.0, 1.0)], False),
        (("mean", "constant"), [(1.0, 1.0), (3.0, 3.0)], True),
        (("sum", "constant"), [(1.0, 1.0), (1.0, 1.0)], False),
        (("mean", "sum"), [(1.0, 1.0)], True),
    ],
)
def test_one_weight_is_exact_if_all_terms_would_have_the_same(
    kinds: tuple[TermKind, ...], counts: list[tuple[float, ...]], expected: bool
) -> None:
    rule = combined(Term(kind, str(place), (LABELS,) if kind == "tokens" else ()) for place, kind in enumerate(kinds))
    counts = [count[: len(rule.terms)] for count in counts]
    assert is_exact(rule, counts) is expected


def test_of_several_terms_the_one_over_labels_leads() -> None:
    rule = combined([Term("mean", "a"), Term("tokens", "b", (LABELS,))])
    assert rule.kind == "mixed"
    assert term_weights(rule, [(1.0, 3.0), (1.0, 1.0)]) == ((0.5, 0.5), (0.75, 0.25))
    assert weights(rule, [(1.0, 3.0), (1.0, 1.0)]) == (0.75, 0.25)


def test_a_count_for_every_term_is_needed() -> None:
    with pytest.raises(RunError, match=r"one count for each term is needed \(terms: 1, given: \[2\]\)"):
        weights(assumed("mean"), [(1.0, 2.0)])
