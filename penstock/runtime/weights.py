"""Weights: how much the loss of each microbatch counts, so that their sum is the loss of the batch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.errors import RunError
from penstock.ir import LossRule, Term

Counts = Sequence[Sequence[float]]
"""for each microbatch, one number for each term of the rule: samples, counted labels; anything for a sum"""


def weights(rule: LossRule, counts: Counts) -> tuple[float, ...]:
    """The factor of each microbatch's loss and of its gradient.

    A weight of 0 means that nothing in the microbatch counts. Its loss is usually 0/0, and backward through that would
    give 0 * NaN: whoever runs it must not start backward from the loss but take all its gradients for zero. If nothing
    counts in any microbatch all weights are NaN, and so is the loss, as in torch.
    """
    return term_weights(rule, counts)[rule.leading]


def term_weights(rule: LossRule, counts: Counts) -> tuple[tuple[float, ...], ...]:
    """For each term of the rule, the factors of the microbatches."""
    if any(len(count) != len(rule.terms) for count in counts):
        raise RunError("one count for each term is needed", terms=len(rule.terms), given=[len(c) for c in counts])
    return tuple(_of_term(term, [count[place] for count in counts]) for place, term in enumerate(rule.terms))


def is_exact(rule: LossRule, counts: Counts, tolerance: float = 1e-14) -> bool:
    """Whether one weight per microbatch is right for all terms; it may not be where terms are divided differently."""
    lead = weights(rule, counts)
    return all(
        abs(sum(lead) - 1) <= tolerance
        if term.kind == "constant"
        else all(abs(one - other) <= tolerance for one, other in zip(own, lead, strict=True))
        for term, own in zip(rule.terms, term_weights(rule, counts), strict=True)
    )


def _of_term(term: Term, counts: Sequence[float]) -> tuple[float, ...]:
    if term.kind == "sum":
        return (1.0,) * len(counts)
    total = float(sum(counts))
    if not term.counts:
        return tuple(_ratio(count, total) for count in counts)
    (count,) = term.counts
    whole = count.divisor(total)
    return tuple(_ratio(count.divisor(number), whole) for number in counts)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")


def weighted_sum(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The loss of the batch from those of its microbatches; what has no weight has no say, even if it is NaN."""
    counted = [value * weight for value, weight in zip(values, weights, strict=True) if weight != 0]
    return torch.stack(counted).sum(0) if counted else torch.zeros_like(values[0])


def count_labels(labels: Tensor, ignore_index: int, class_weights: Tensor | None = None) -> float:
    """How many labels count, each as much as its class does."""
    counted = labels.detach().flatten()
    counted = counted[counted != ignore_index]
    if class_weights is None:
        return float(counted.numel())
    return float(class_weights.detach().double()[counted].sum())
