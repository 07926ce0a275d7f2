"""Verdict: the rule that is used, from what was read of a loss and what a trial of it gave."""

from dataclasses import dataclass, replace

from penstock.ir import LossRule
from penstock.runtime.losses.given import given_rule
from penstock.runtime.losses.reading import Counter, Reading
from penstock.runtime.losses.trial import Trial
from penstock.runtime.weights import Counts, is_exact, weights

UNSEEN = "how the loss is made of its samples cannot be seen, so that each is taken to count alike"
APART = "the loss of a microbatch is not made of those of its parts, so samples act on each other"
MIXED = "the terms of the loss are divided by different things, of which the first over labels counts"


@dataclass(frozen=True)
class Verdict:
    """A rule, who counts by it, and in words what speaks against it."""

    rule: LossRule
    counter: Counter
    doubts: tuple[str, ...] = ()
    is_read: bool = False
    """whether it is the rule that was read, so that every term is known"""
    is_given: bool = False
    """whether the user asked for it, whatever the numbers say"""
    is_final: bool = True
    """whether another microbatch would tell no more"""
    is_ambiguous: bool = False
    """whether it may be a mean over samples as well as over labels: all that were tried have as many labels"""


def verdict(reading: Reading, trial: Trial | None, reduction: str | None = None) -> Verdict:
    """The rule that was asked for, else the one that was read if the trial bears it out, else one that it does."""
    if reduction is not None:
        return Verdict(*given_rule(reduction, reading.rule, reading.counter), reading.couplings, is_given=True)
    read = Verdict(reading.rule, reading.counter, is_read=True)
    if trial is None or trial.evidence is None:
        return _untried(reading, trial)
    own = _counts(read, trial)
    if own is None and reading.rule.is_known and reading.rule.kind != "mixed":
        return _untried(reading, trial)
    is_unknown = reading.rule.kind == "unknown"
    kinds = ("mean", "sum", "tokens") if is_unknown else ("mean", "sum")
    others = [Verdict(*given_rule(kind, reading.rule, reading.counter)) for kind in kinds]
    candidates = [*others, read] if is_unknown else [read, *others]
    right = [candidate for candidate in candidates if _is_borne_out(candidate, trial)]
    if right:
        is_ambiguous = {"mean", "tokens"} <= {candidate.rule.kind for candidate in right}
        doubts = _lasting(reading, trial.evidence.is_precise)
        return replace(right[0], doubts=doubts, is_ambiguous=is_unknown and is_ambiguous)
    if own is None:
        return _untried(reading, trial)
    if reading.rule.kind == "mixed" and reading.rule.is_known and not is_exact(reading.rule, own):
        # No single weight could have been borne out; every step tells whether its own is right.
        return replace(read, doubts=reading.couplings)
    return replace(read, doubts=reading.couplings or _curve(reading.rule) or (APART,))


def _is_borne_out(candidate: Verdict, trial: Trial) -> bool:
    counts = _counts(candidate, trial)
    return bool(counts and trial.evidence and trial.evidence.bears_out(weights(candidate.rule, counts)))


def _counts(candidate: Verdict, trial: Trial) -> Counts | None:
    """What the terms are divided by in the parts that were tried; None if that cannot be said of them."""
    try:
        found = [candidate.counter(piece, trial.recording) for piece in trial.pieces]
    except Exception:
        # Parts have another form than what was recorded.
        return None
    return [counts for counts in found if counts is not None] if None not in found else None


def _untried(reading: Reading, trial: Trial | None) -> Verdict:
    """Without evidence what was read must do; what was not even read is said."""
    doubts = reading.couplings or _curve(reading.rule)
    failure = trial.failure if trial else ""
    if not doubts and not reading.rule.is_known:
        doubts = (f"{UNSEEN}{f' (it could not be tried: {failure})' if failure else ''}",)
    elif not doubts and failure.startswith("it does not take"):
        doubts = (f"the loss could not be tried on parts of a microbatch, as {failure}",)
    return Verdict(reading.rule, reading.counter, doubts, is_read=True, is_final=trial is None or trial.is_final)


def _lasting(reading: Reading, is_precise: bool) -> tuple[str, ...]:
    """What is said although a trial bears the rule out."""
    return (reading.hidden_couplings if is_precise else reading.couplings) or _curve(reading.rule)


def _curve(rule: LossRule) -> tuple[str, ...]:
    names = [term.value for term in rule.terms if term.kind == "curved"]
    if not names:
        return ()
    words = (
        "the loss is a function of means or sums, and no sum of them, so that of a batch is not made of microbatches"
    )
    return (f"{words}: {', '.join(names[:3])}",)
