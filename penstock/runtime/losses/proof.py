"""Proof: whether the counts of a step are what its losses were really divided by."""

from collections.abc import Sequence

from penstock.ir import LossRule
from penstock.runtime.losses.divisors import LiveTerm
from penstock.runtime.weights import Counts, term_weights, weights

_ROUNDING = 1e-9


def are_divisors(rule: LossRule, counts: Counts, terms: Sequence[Sequence[LiveTerm]]) -> bool:
    """Whether each term, given as what it was in every microbatch, was divided by what some term of the rule says.

    A microbatch in which nothing counts may be divided by anything.
    """
    found = list(zip(rule.terms, term_weights(rule, counts), strict=True))
    return all(any(_fits(term.kind == "sum", own, live) for term, own in found) for live in terms)


def have_equal_weights(rule: LossRule, counts: Counts, other: LossRule, other_counts: Counts) -> bool:
    """Whether it does not matter by which of two rules a step is weighted."""
    pairs = zip(weights(rule, counts), weights(other, other_counts), strict=True)
    return all(is_close(one, another, _ROUNDING) for one, another in pairs)


def _fits(is_sum: bool, own: Sequence[float], live: Sequence[LiveTerm]) -> bool:
    counted = [place for place, weight in enumerate(own) if weight]
    live, weights_of = [live[place] for place in counted], [own[place] for place in counted]
    divisors = [divisor for term in live if (divisor := term.divisor) is not None]
    if not live or live[0].kind == "constant" or len(divisors) < len(live):
        return True
    rounding = max(_ROUNDING, *(term.rounding for term in live))
    are_alike = all(is_close(divisor, divisors[0], rounding) for divisor in divisors)
    if is_sum or (are_alike and live[0].kind == "unknown"):
        return are_alike
    total, whole = sum(divisors), sum(weights_of)
    if not total or whole != whole:
        return True
    pairs = zip(divisors, weights_of, strict=True)
    return all(is_close(divisor / total, weight / whole, rounding) for divisor, weight in pairs)


def is_close(one: float, other: float, rounding: float) -> bool:
    """Whether two numbers are the same up to rounding."""
    return one == other or abs(one - other) <= rounding * max(abs(one), abs(other))
