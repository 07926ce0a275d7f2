"""The reductions of losses, and the weights of microbatches that follow from counting samples, labels or a mask."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from penstock.batches import IGNORE_INDEX, is_of_target
from penstock.capture import is_inexact, is_integer, is_ordered
from penstock.errors import RunError

Piece = tuple[Mapping[str, Tensor], int]
"""the tensors of some samples whose entries may be counted, by name, and the number of samples"""


@dataclass(frozen=True)
class Reduction:
    """What a loss is divided by: the samples, entries of a tensor among targets or inputs, or nothing (a sum)."""

    name: str
    """one of `REDUCTIONS`"""
    tensor: str = ""
    """of "tokens": the name of the tensor whose entries are counted; empty: all labels together"""
    ignore_index: int | None = None
    """entries with this value do not count; None: the entries are added up, as those of a mask are"""
    skips_first: bool = False
    """whether the first position of every sample does not count: language models predict the next token"""

    @cached_property
    def is_sum(self) -> bool:
        """Whether the loss is a sum, which has no divisor."""
        return self.name == "sum"

    @cached_property
    def counts_entries(self) -> bool:
        """Whether entries of tensors are counted, such as labels, and not only samples."""
        return self.name == "tokens"

    @property
    def is_usual(self) -> bool:
        """Whether the losses of torch have this divisor without arguments."""
        return not self.counts_entries or self.ignore_index == IGNORE_INDEX

    def applies_to(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether the tensors include the counted one."""
        if not self.counts_entries:
            return True
        if not self.tensor:
            return bool(_labels(tensors))
        return self.tensor in tensors and tensors[self.tensor].dim() > self.skips_first

    def totals(self, pieces: Sequence[Piece]) -> list[float]:
        """The count of each piece. All of them are read at once: on a GPU every read waits for the device."""
        if not self.counts_entries:
            return [float(size) for _, size in pieces]
        counts = []
        for tensors, _ in pieces:
            counted_tensors = [tensors[self.tensor]] if self.tensor else _labels(tensors)
            if not counted_tensors:
                raise RunError(
                    f'reduction="{self.name}" requires labels to count, got none',
                    hint="give class indices as target= or labels=, or another reduction",
                )
            sums = []
            for tensor in counted_tensors:
                entries = tensor.detach()[:, 1:] if self.skips_first else tensor.detach()
                counted = entries if self.ignore_index is None else entries != self.ignore_index
                sums.append(counted.sum(dtype=torch.float64))
            counts.append(torch.stack(sums).sum())
        return torch.stack(counts).tolist()

    def weights(self, pieces: Sequence[Piece]) -> tuple[float, ...]:
        """The weight of each piece of a batch."""
        totals = self.totals(pieces)
        return self.weights_of(totals, sum(totals))

    def weights_of(self, totals: Sequence[float], total: float, num_replicas: int = 1) -> tuple[float, ...]:
        """The weights of pieces with these counts, in a batch with the count `total` over all replicas.

        A weight of 0 means that nothing in the piece counts. Its loss is usually 0/0, and backward through that would
        give 0 * NaN: callers must not start backward from it but treat its gradients as zero. If nothing counts in any
        piece all weights are NaN.
        """
        if self.is_sum:
            return (1.0,) * len(totals)
        # The replicas average their gradients, so weights are multiplied by their number.
        return tuple(count / total * num_replicas if total else math.nan for count in totals)


_USUAL = (Reduction("mean"), Reduction("tokens", ignore_index=IGNORE_INDEX), Reduction("sum"))
REDUCTIONS = {reduction.name: reduction for reduction in _USUAL}
"""by the name that users give"""
SAMPLE_REDUCTIONS = tuple(name for name, reduction in REDUCTIONS.items() if not reduction.counts_entries)
"""those that count samples only, which losses of `add_loss` may have"""


def _labels(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """The class indices of the target, or of the input named `labels`."""
    named = [tensor for name, tensor in tensors.items() if name == "labels" or is_of_target(name)]
    return [tensor for tensor in named if not is_inexact(tensor)]


def candidates(pieces: Sequence[Piece]) -> Iterator[Reduction]:
    """The reductions that the loss of some pieces may have, the cheapest first."""
    yield Reduction("mean")
    # Only tensors with a dimension of samples: others are the same in every microbatch.
    for name, tensor in pieces[0][0].items():
        if not tensor.numel() or pieces[0][1] not in tensor.shape or not is_ordered(tensor):
            continue
        positions = (False, True) if tensor.dim() > 1 and tensor.shape[1] > 1 else (False,)
        if is_integer(tensor):
            # Besides -100, the label of padding that is ignored is usually the smallest or the largest one.
            ends = torch.stack([torch.stack(tensors[name].aminmax()) for tensors, _ in pieces])
            ignored = dict.fromkeys((IGNORE_INDEX, int(ends.min()), int(ends.max())))
            yield from (Reduction("tokens", name, value, skips) for value in ignored for skips in positions)
        # A mask, or weights of samples or tokens: the divisor is the sum of their entries.
        yield from (Reduction("tokens", name, None, skips) for skips in positions)
    yield Reduction("sum")


def weighted_sum(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The loss of the batch from those of its microbatches. A loss of weight 0 is left out: it may be NaN."""
    counted = [value * weight for value, weight in zip(values, weights, strict=True) if weight != 0]
    return torch.stack(counted).sum(0) if counted else torch.zeros_like(values[0])
