"""Case: a microbatch on which a loss is looked at, and another sample of its batch to try it with."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor

from penstock.capture import Microbatch
from penstock.runtime.losses.rows import rows, tensors

_IGNORED = -100


class Partner(NamedTuple):
    """What one other sample was given."""

    args: Any
    kwargs: Any
    target: Any
    has_other_labels: bool
    """whether more or fewer of its labels count than of the sample it is a partner of"""


@dataclass(frozen=True)
class Case:
    """The output of a microbatch, if that is known, and all microbatches of its batch."""

    pieces: Sequence[Microbatch]
    microbatch: int
    output: Any = None

    @property
    def piece(self) -> Microbatch:
        """The microbatch itself."""
        return self.pieces[self.microbatch]

    @cached_property
    def partner(self) -> Partner:
        """Another sample; looked for only when it is needed."""
        return partner_of(self.pieces, self.microbatch)


def partner_of(pieces: Sequence[Microbatch], microbatch: int) -> Partner:
    """The partner of the first sample of a microbatch: one with another number of labels, else one of the next."""
    own = _num_labels(pieces[microbatch])
    turned = [*pieces[microbatch + 1 :], *pieces[:microbatch], pieces[microbatch]]
    if own:
        for piece in turned:
            for row, number in enumerate(_num_labels(piece)):
                if number != own[0]:
                    return _sample(piece, row, True)
    return _sample(turned[0], 0, False)


def _sample(piece: Microbatch, row: int, has_other_labels: bool) -> Partner:
    args, kwargs, target = rows((piece.args, piece.kwargs, piece.target), piece.size, row, 1)
    return Partner(args, kwargs, target, has_other_labels)


def _num_labels(piece: Microbatch) -> list[int]:
    """How many labels of each sample are not ignored; empty if there are none."""
    given = piece.kwargs.get("labels") if piece.target is None else piece.target
    whole = [leaf for leaf in tensors(given) if not leaf.is_floating_point() and leaf.shape[:1] == (piece.size,)]
    counts = [_counted(leaf) for leaf in whole]
    return [sum(column) for column in zip(*counts, strict=True)]


def _counted(labels: Tensor) -> list[int]:
    return (labels != _IGNORED).reshape(len(labels), -1).sum(1).tolist()
