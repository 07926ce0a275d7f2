"""Trial: whether a rule really makes the loss of a batch from those of its parts, tried on one microbatch."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.ir.containers import transform
from penstock.ir.loss import LossRule
from penstock.runtime.batch import Microbatch
from penstock.runtime.weights import weights
from penstock.training.reductions import Counter

LossFn = Callable[[Any, Any], Any]
_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3}


def is_right(loss_fn: LossFn, found: tuple[LossRule, Counter], output: Any, target: Any, size: int) -> bool | None:
    """Compare the loss of a microbatch with those of its two halves; None where it cannot be told.

    The loss function is called three times, without gradients.
    """
    if size < 2:
        return None
    rule, counter = found
    first = size // 2
    spans = ((0, first), (first, size - first))
    try:
        with torch.no_grad():
            parts = [_part((output, target), size, *span) for span in spans]
            whole, *losses = (_number(loss_fn(*pair)) for pair in (_part((output, target), size, 0, size), *parts))
            pieces = [Microbatch((), {}, pair[1], span[1]) for pair, span in zip(parts, spans, strict=True)]
            shares = weights(rule, [counter(piece) for piece in pieces])
    except Exception:
        # What cannot be called with a part of a batch has no parts to compare.
        return None
    counted = [share * float(loss) for share, loss in zip(shares, losses, strict=True) if share]
    tolerance = _TOLERANCES.get(whole.dtype)
    if tolerance is None or not bool(torch.isfinite(whole)):
        return None
    scale = max(abs(float(whole)), *map(abs, counted), 1e-12)
    return math.isfinite(scale) and abs(sum(counted) - float(whole)) <= tolerance * scale


def _part(thing: Any, size: int, start: int, length: int) -> Any:
    def cut(leaf: object) -> object:
        if isinstance(leaf, Tensor):
            leaf = leaf.detach()
            return leaf.narrow(0, start, length) if leaf.dim() and leaf.shape[0] == size else leaf
        return leaf

    return transform(thing, cut)


def _number(loss: Any) -> Tensor:
    return loss.detach().reshape(())  # type: ignore[no-any-return]
