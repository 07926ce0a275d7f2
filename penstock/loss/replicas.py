"""Weights among the microbatches of all replicas, of which each has only its own batch.

A ReplicaGroup can only sum numbers. Replicas compare a number by its sum and the sum of its squares, see `_are_equal`.
"""

import zlib
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from penstock.batches import Microbatch
from penstock.errors import RunError
from penstock.ir import choices_text, map_leaves
from penstock.loss.detect_reduction import INSEPARABLE, Decision
from penstock.loss.reduction_weights import REDUCTIONS, Piece, Reduction

_ROUNDING = 1e-6
_NUM_BUCKETS = 1 << 12
"""of the hashes of reductions, when replicas look for one that fits on all of them"""
_NUM_CODES = 1 << 20
"""few enough that the squares of their sums are exact in float64"""


class ReplicaGroup(Protocol):
    """The copies of the pipeline that train on other batches at the same time."""

    @property
    def count(self) -> int:
        """The number of replicas."""

    def sum(self, values: Tensor) -> Tensor:
        """The values summed over all replicas."""


def reference_sample(microbatch: Microbatch) -> Microbatch:
    """One sample that is the same on every replica: every label, mask, weight and value is 1."""

    def ones(leaf: object) -> object:
        # A scalar belongs to the whole batch, such as a divisor of the loss.
        return torch.ones_like(leaf) if isinstance(leaf, Tensor) and leaf.dim() else leaf

    sample = microbatch.take(0, 1)
    args, kwargs, target = map_leaves((sample.args, sample.kwargs, sample.target), ones)
    return sample._replace(args=args, kwargs=kwargs, target=target)


def agree_on_names(replicas: ReplicaGroup, names: Iterable[str]) -> None:
    """Raise a RunError, on every replica, if the replicas have losses of different names."""
    names = sorted(names)
    code = _hash(names)
    total, squares = replicas.sum(torch.tensor([code, code**2], dtype=torch.float64)).tolist()
    if not _are_equal(replicas, total, squares):
        hint = "the same dict of losses on every replica"
        raise RunError("losses must have the same names on all replicas", names=", ".join(names), hint=hint)


def weights_among_replicas(
    replicas: ReplicaGroup, decision: Decision, weights: Sequence[float], pieces: Sequence[Piece], reduction_name: str
) -> tuple[tuple[float, ...], str]:
    """The weights among the microbatches of all replicas, and why they are not exact.

    `weights` are those of the own microbatches and, unless it is an invalid target, of the reference microbatch. A
    collective call of the replicas: each takes part with every value, even if it does not need the sums.
    `reduction_name` is for an error.
    """
    num_replicas, num_own, reduction = replicas.count, len(pieces), decision.reduction
    has_reference = len(weights) > num_own and weights[-1] > 0
    # Only a divisor that adds up over microbatches, as a sum of class weights does, adds up over replicas.
    is_additive = has_reference and abs(sum(weights) - 1) <= _ROUNDING
    problem = decision.problem or ("" if reduction is not None or is_additive else INSEPARABLE)
    if problem or decision.is_provisional:
        shares = [float(size) for _, size in pieces]
    else:
        # The reference is the same on all replicas, so that shares relative to it can be added up.
        shares = [weight / weights[-1] for weight in weights[:num_own]] if is_additive else []
    totals = [] if reduction is None else reduction.totals(pieces)
    # Hashes of the reduction, and of the number of entries per sample: both are compared between the replicas.
    code = _hash(reduction)
    length = _hash(sum(tensor.numel() // pieces[0][1] for tensor in pieces[0][0].values()))
    values = [code, code**2, length, length**2, float(bool(shares)), sum(shares), sum(totals)]
    sums = replicas.sum(torch.tensor(values, dtype=torch.float64)).tolist()
    codes, square_codes, lengths, square_lengths, num_shared, all_shares, total = sums
    if reduction is not None and _are_equal(replicas, codes, square_codes):
        return reduction.weights_of(totals, total, num_replicas), problem
    if num_shared == num_replicas and _are_equal(replicas, lengths, square_lengths):
        return Reduction("mean").weights_of(shares, all_shares, num_replicas), problem
    agreed = _agreed_weights(replicas, decision, pieces)
    if agreed is not None:
        return agreed, problem
    raise RunError(
        "the replicas disagree about how the loss is averaged",
        reduction=reduction_name,
        hint=f"reduction={choices_text(REDUCTIONS)}",
    )


def _are_equal(replicas: ReplicaGroup, total: float, squares: float) -> bool:
    """Whether n replicas have the same number, given the sums of the numbers and of their squares.

    By the Cauchy-Schwarz inequality n times the sum of squares is the square of the sum only if all are equal.
    """
    return total**2 == replicas.count * squares


def _agreed_weights(replicas: ReplicaGroup, decision: Decision, pieces: Sequence[Piece]) -> tuple[float, ...] | None:
    """The weights from a reduction that fits the batches of all replicas; None if none fits.

    Several may have the same weights on the batch of one replica and other weights elsewhere: without padding, the
    number of labels is in proportion to that of samples. Such a replica may have decided for another one than the rest.
    """
    fitting = [] if decision.problem else [each for each in decision.reductions if not each.is_sum]
    fits = torch.zeros(_NUM_BUCKETS, dtype=torch.float64)
    fits[[int(_hash(each)) % _NUM_BUCKETS for each in fitting]] = 1.0
    common = (replicas.sum(fits) == replicas.count).nonzero().flatten().tolist()
    if not common:
        return None
    agreed = next(each for each in fitting if int(_hash(each)) % _NUM_BUCKETS == common[0])
    totals, code = agreed.totals(pieces), _hash(agreed)
    sums = replicas.sum(torch.tensor([code, code**2, sum(totals)], dtype=torch.float64)).tolist()
    has_agreed = _are_equal(replicas, *sums[:2]) and sums[2]
    return agreed.weights_of(totals, sums[2], replicas.count) if has_agreed else None


def _hash(value: object) -> float:
    """The same number on every replica for equal values, small enough for `_are_equal` to be exact."""
    return float(zlib.crc32(repr(value).encode()) % _NUM_CODES)
