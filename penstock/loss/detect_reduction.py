"""Detects which of the reductions in `reduction_weights.py` a loss has, and so how its weights are found.

The weights of microbatches are counted, or the loss is evaluated in every step.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from torch import Tensor

from penstock.batches import Microbatch
from penstock.errors import PenstockError
from penstock.launch import one_line
from penstock.loss.probe import Evaluate, Evaluation, Probe
from penstock.loss.reduction_weights import Piece, Reduction, candidates
from penstock.loss.samples import LARGE, SampleRange, choose_parts

_MAX_TOGETHER = 8 * LARGE
"""entries of the outputs of a batch above which microbatches are evaluated in pairs instead of all together"""
INSEPARABLE = (
    "the loss of the batch is not a weighted sum of the losses of its microbatches: its samples interact, as in a "
    "contrastive loss, or it has terms that are averaged over different numbers (exact if returned as a dict of "
    "losses), or it is a function of an average"
)
UNDECIDED = "how the loss is averaged over samples could not be determined, so each sample is given the same weight"


class ProbedLoss(Protocol):
    """A loss that can be evaluated on parts of a batch: `LossFunction`, or `ModelLoss` for one that a model returns."""

    microbatches: Sequence[Microbatch]
    """those of the step"""

    @property
    def sample_size(self) -> int:
        """The number of entries that the outputs have for each sample."""

    def tensors(self, microbatch: Microbatch) -> dict[str, Tensor]:
        """The tensors of a microbatch, by name, whose number or sum of entries may be the divisor of the loss."""

    def evaluator(self, parts: Sequence[SampleRange], draw: int) -> AbstractContextManager[Evaluate]:
        """A context in which some parts can be evaluated, with different outputs in every draw."""


@dataclass(frozen=True)
class Decision:
    """How the weights of a step are found."""

    reduction: Reduction | None
    """that of the loss, whose divisor is counted in every step; None: the loss is evaluated in every step"""
    alternatives: tuple[Reduction, ...] = ()
    """others that fitted as well, because they have given the same weights so far"""
    problem: str = ""
    """why the weights are not, or may not be, exact"""
    is_provisional: bool = False
    """whether the next step should decide again, because this one was not conclusive"""

    @cached_property
    def reductions(self) -> tuple[Reduction, ...]:
        """The reduction and its alternatives."""
        return () if self.reduction is None else (self.reduction, *self.alternatives)


def decide(loss: ProbedLoss, pieces: Sequence[Piece], step_number: int) -> tuple[Decision, tuple[float, ...]]:
    """Determine how the loss of a step is averaged over samples, and the weights of its microbatches.

    The outputs that the loss is evaluated on vary with `step_number`. If they are large, a few samples of every
    microbatch are tried first. That is enough if the weights are counts of samples, labels or mask entries.
    """
    sizes = [size for _, size in pieces]
    everything = [SampleRange(index, 0, size) for index, size in enumerate(sizes)]
    few = choose_parts(sizes, loss.sample_size, [tensors for tensors, _ in pieces], len(sizes), step_number)
    for parts in (few, everything):
        weights = None
        try:
            decision, weights = _decide_on(loss, parts, step_number)
        except PenstockError:
            raise
        except Exception as error:  # a user's loss may raise anything for parts of a batch
            problem = f"{UNDECIDED} (it cannot be evaluated on part of a batch: {one_line(error)})"
            decision = Decision(Reduction("mean"), problem=problem)
        # A decision that was made on few samples is final only if it is a reduction without doubts.
        if decision.reduction is None:
            if parts == everything and weights is not None:
                return decision, weights
        elif parts == everything or not (decision.problem or decision.is_provisional):
            weights, *others = [reduction.weights(pieces) for reduction in decision.reductions]
            # Reductions that agree on a few samples may differ on all of them.
            if parts == everything or all(other == weights for other in others):
                return decision, weights
    raise AssertionError("unreachable: evaluating all microbatches always gives a decision")


def reduction_fits(reduction: Reduction, loss: ProbedLoss, pieces: Sequence[Piece], step_number: int) -> bool:
    """Whether a reduction gives the weights of two microbatches of a step, or of a few samples of them."""
    sizes = [size for _, size in pieces]
    parts = choose_parts(sizes, loss.sample_size, [tensors for tensors, _ in pieces], 2, step_number)
    try:
        with loss.evaluator(parts, step_number) as evaluate:
            probe = Probe.of(evaluate, range(len(parts)))
    except PenstockError:
        raise
    except Exception:  # a user's loss may raise anything for parts of a batch
        return False
    return not probe.is_decisive or probe.fits(reduction.weights(_pieces(loss, parts)))


def evaluated_weights(loss: ProbedLoss, pieces: Sequence[Piece], step_number: int) -> tuple[float, ...] | None:
    """The weights of a step from the gradients of its loss; None if no weights fit them."""
    parts = [SampleRange(index, 0, size) for index, (_, size) in enumerate(pieces)]
    try:
        probes = _probes(loss, parts, (step_number,), {})
        if probes[0].is_decisive and not all(probes[0].weights):
            # A gradient was zero: the part has no labels, or its outputs happen to be in a flat region of the loss.
            probes += _probes(loss, parts, (step_number + 1,), {})
    except PenstockError:
        raise
    except Exception:  # as above
        return None
    weights = _combine_draws(probes)
    return weights if weights is not None and all(probe.fits(weights) for probe in probes) else None


def _decide_on(
    loss: ProbedLoss, parts: Sequence[SampleRange], step_number: int
) -> tuple[Decision, tuple[float, ...] | None]:
    """The decision from the gradients for some parts, and the weights of these if they cannot be counted."""
    pieces = _pieces(loss, parts)
    known = {reduction: reduction.weights(pieces) for reduction in candidates(pieces)}
    probes = _probes(loss, parts, (2 * step_number, 2 * step_number + 1), known)
    weights = _combine_draws(probes)
    if weights is None:
        # A loss of NaN or 0 comes from a batch without labels, for which any weights are right. In either case the
        # next step may be conclusive.
        has_loss = any(math.isfinite(probe.loss) and probe.loss for probe in probes)
        return Decision(Reduction("mean"), problem=UNDECIDED if has_loss else "", is_provisional=True), None
    decisive = [probe for probe in probes if probe.is_decisive]

    def distance(reduction: Reduction) -> float:
        return max(probe.distance(known[reduction]) for probe in decisive)

    fitting = [reduction for reduction in known if all(probe.fits(known[reduction]) for probe in decisive)]
    if fitting:
        # Several may fit within the tolerance. The closest is used as long as all of them give the same weights.
        best, *alternatives = sorted(fitting, key=distance)
        return Decision(best, tuple(alternatives)), None
    if all(probe.fits(weights) for probe in decisive):
        return Decision(None), weights
    # No weights are exact. Those of the largest term of the loss are used: of the mean over labels if they are much
    # closer than those of the mean over samples, else of the latter.
    best = min((reduction for reduction in known if reduction.is_usual), key=distance)
    best = best if distance(best) < distance(Reduction("mean")) / 2 else Reduction("mean")
    return Decision(best, problem=INSEPARABLE), None


def _probes(
    loss: ProbedLoss, parts: Sequence[SampleRange], draws: Sequence[int], known: Mapping[Reduction, tuple[float, ...]]
) -> list["Probe | _PairProbe"]:
    """One probe for each draw; `known` are reductions whose weights will be compared with them."""
    probes: list[Probe | _PairProbe] = []
    is_large = loss.sample_size * sum(part.length for part in parts) > _MAX_TOGETHER
    for draw in draws:
        with loss.evaluator(parts, draw) as evaluate:
            if is_large and len(parts) > 2:
                probes.append(_PairProbe(evaluate, len(parts), known))
            else:
                probes.append(Probe.of(evaluate, range(len(parts))))
    return probes


def _combine_draws(probes: Sequence["Probe | _PairProbe"]) -> tuple[float, ...] | None:
    """The weights from all draws; None if no draw is decisive.

    A part whose gradient is zero in one draw, as with a hinge loss, takes its weight from the other.
    """
    columns = zip(*(probe.weights for probe in probes if probe.is_decisive), strict=True)
    return tuple(next((weight for weight in column if weight), 0.0) for column in columns) or None


class _PairProbe:
    """Like `Probe`, but only two parts at a time are evaluated together, which bounds the memory.

    This is enough if the loss is a sum over a divisor that adds up over microbatches: two of them with the divisors d
    and e have the weights d / (d + e) and e / (d + e). A sum has the weights 1 and 1. Every part is paired with the
    same one, the pivot, so that the ratio of their two weights is the part's divisor relative to that of the pivot.
    """

    def __init__(self, evaluate: Evaluate, num_parts: int, known: Mapping[Reduction, tuple[float, ...]]) -> None:
        self.loss = self.tolerance = 0.0
        self.is_decisive = False
        self._fits = dict.fromkeys(known.values(), True)
        reductions = {weights: reduction for reduction, weights in known.items()}
        self._is_consistent = True
        """whether the pairs agree with one another, and each with its own weights"""
        alone: dict[int, Evaluation] = {}
        # The divisors of the parts so far, relative to that of the pivot.
        shares, pivot, kinds = [1.0], 0, set[str]()
        for other in range(1, num_parts):
            probe = Probe.of(evaluate, (pivot, other), alone)
            # Only the evaluation of the pivot is needed again.
            del alone[other]
            self.loss, self.tolerance = probe.loss, max(self.tolerance, probe.tolerance)
            if not probe.is_decisive:
                shares.append(0.0)
                continue
            self.is_decisive = True
            for weights, reduction in reductions.items():
                # The weights among all parts are in proportion to their counts, which give the weights of the two.
                pair = (weights[pivot], weights[other])
                self._fits[weights] &= probe.fits(reduction.weights_of(pair, sum(pair) or 1.0))
            pivot_weight, other_weight = probe.weights
            self._is_consistent &= probe.fits((pivot_weight, other_weight))
            if pivot_weight and other_weight:
                # Only two parts that both count distinguish a sum from a mean.
                kinds.add("sum" if abs(pivot_weight - 1) <= probe.tolerance else "mean")
                expected_sum = 2.0 if kinds == {"sum"} else 1.0
                self._is_consistent &= abs(pivot_weight + other_weight - expected_sum) <= probe.tolerance
            # A weight may be 0 although the part counts, if its gradient happens to be zero. The two weights add up to
            # 1, so its share still follows from the other weight: e / d = 1 / (d / (d + e)) - 1.
            if pivot_weight or not other_weight:
                shares.append(other_weight / pivot_weight if other_weight else max(0.0, 1 / (pivot_weight or 1.0) - 1))
            else:
                # The gradient of the pivot is zero: this part becomes the pivot, and earlier shares are rescaled to it.
                shares, pivot = [share * max(0.0, 1 / other_weight - 1) for share in shares] + [1.0], other
        self.weights = Reduction("sum" if kinds == {"sum"} else "mean").weights_of(shares, sum(shares))

    def fits(self, weights: tuple[float, ...]) -> bool:
        """Whether these are the weights of all pairs."""
        return self._fits.get(weights, self._is_consistent and self.distance(weights) <= self.tolerance)

    def distance(self, weights: Sequence[float]) -> float:
        """The largest difference between weights and those of the pairs; 0 within rounding."""
        furthest = max(abs(weight - expected) for weight, expected in zip(weights, self.weights, strict=True))
        return furthest if furthest > self.tolerance / 100 else 0.0


def _pieces(loss: ProbedLoss, parts: Sequence[SampleRange]) -> list[Piece]:
    """The tensors of the samples of each part."""
    taken = [loss.microbatches[part.microbatch].take(part.start, part.length) for part in parts]
    return [(loss.tensors(microbatch), microbatch.size) for microbatch in taken]
