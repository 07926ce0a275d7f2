"""Finds the lengths of the samples of a padded batch, and cuts the padding off microbatches of similar lengths."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.batches.microbatches import Columns, Microbatch, select_columns
from penstock.batches.sample_axes import TARGET, SampleAxis, is_of_target
from penstock.capture import is_integer
from penstock.errors import RunError
from penstock.ir import listed, named_leaves

_MASKS = ("attention_mask", "mask")
"""names of arguments that are 1 at the tokens of a sample and 0 at its padding"""
_INVERTED_MASK_SUFFIX = "key_padding_mask"
"""the end of the names of masks that are True at the padding, as in torch.nn.Transformer"""
_LABELS, _LOSS_MASKS = "labels", ("loss_mask",)
IGNORE_INDEX = -100
"""the label that torch ignores by default"""
_HINT = "attention_mask=..., of shape (samples, length) with 0 at padding, or labels or a target of -100 there"


@dataclass(frozen=True)
class Padding:
    """Where the samples of a batch are padded."""

    whole: Microbatch
    """the whole batch"""
    width: int
    """the length to which the samples are padded"""
    lengths: tuple[int, ...]
    """the positions of each sample that must be kept: those of its tokens, and one of padding on the left"""
    is_left: bool
    """whether the padding comes before the sample"""
    names: tuple[str, ...]
    """of the tensors that hold a position of the sequence in each column"""
    kind: tuple[Any, ...]
    """equal for batches whose padding is shown in the same way"""

    def microbatch(self, samples: Sequence[int], length: int) -> Microbatch:
        """The microbatch of some samples, without the padding beyond a length that all of them fit into."""
        start, stop = (self.width - length, self.width) if self.is_left else (0, length)
        if (start, stop) != (0, self.width):
            self._check_understood()
        return select_columns(Columns(self.whole, tuple(samples), frozenset(self.names), start, stop))

    def _check_understood(self) -> None:
        """Raise an error if a tensor has the length of the sequence in a place where it is not known how to cut it."""
        for name, tensor, axis in _tensors(self.whole):
            dims = [dim for dim, length in enumerate(tensor.shape) if length == self.width]
            if name in self.names:
                dims = [dim for dim in dims if dim > 1]
            elif axis is not None and axis.dim is not None:
                dims = [dim for dim in dims if dim != axis.dim]
            if dims:
                raise RunError(
                    "budget_tokens cannot cut the padding off an argument that has the length of the sequence in "
                    f"dimension {dims[0]}",
                    argument=name,
                    shape=tuple(tensor.shape),
                    length=self.width,
                    hint="arguments of shape (samples, length, ...), such as a mask of two dimensions; or another "
                    "padded length, if another size has this value by chance",
                )


def find_padding(whole: Microbatch) -> Padding:
    """The lengths of the samples of a batch, from masks and labels.

    Masks are 0 at padding (True in a `key_padding_mask`). Without a mask, labels or a target of -100 at the end of a
    sample show its padding: the prompt at its beginning may have such labels too.

    Raises:
        RunError: if nothing shows the lengths, or padding is on both sides
    """
    masks, labels = {}, {}
    for name, tensor, axis in _tensors(whole):
        word = name.rpartition(".")[2]
        if axis is None or axis.dim != 0 or axis.rows != 1 or axis.offsets or tensor.dim() != 2:
            continue
        if word in _MASKS or word.endswith(_INVERTED_MASK_SUFFIX):
            masks[name] = tensor == 0 if word.endswith(_INVERTED_MASK_SUFFIX) else tensor != 0
            if bool(((tensor != 0) & (tensor != 1)).any()):
                raise RunError("a mask must be 0 or 1 for budget_tokens to read lengths from it", argument=name)
        elif word in _LOSS_MASKS:
            labels[name] = tensor != 0
        elif (word == _LABELS or is_of_target(name)) and is_integer(tensor):
            labels[name] = tensor != IGNORE_INDEX
    shown = {**masks, **labels}
    if not shown:
        names = [name for name, _, _ in _tensors(whole)]
        raise RunError(
            "budget_tokens needs a mask or labels that show the length of every sample", tensors=names, hint=_HINT
        )
    widths = {name: tensor.shape[1] for name, tensor in shown.items()}
    if len(set(widths.values())) > 1:
        raise RunError(
            "budget_tokens needs masks and labels of one length, got several",
            lengths=widths,
            hint="leave out budget_tokens: sources and targets of different lengths are not grouped",
        )
    width = next(iter(widths.values()))
    ends = torch.stack([_ends(list(each.values())) for each in (masks, labels) if each]).tolist()
    firsts, lasts = ends[0]
    # Without a mask only the end counts: labels of -100 at the beginning are those of a prompt.
    # A sample of padding only, which ends at 0, may be in a batch with padding on either side.
    begins_with_padding = bool(masks) and any(first and last for first, last in zip(firsts, lasts, strict=True))
    is_left = begins_with_padding and all(last in (0, width) for last in lasts)
    if begins_with_padding and not is_left:
        raise RunError(
            "budget_tokens needs samples that are all padded on the same side, got padding on both sides or in between",
            masks=listed(list(masks)),
            hint='padding_side="right" of the tokenizer',
        )
    has_labels_in_padding = False
    if masks and labels:
        pairs = zip(firsts, ends[1][0], strict=True) if is_left else zip(ends[1][1], lasts, strict=True)
        has_labels_in_padding = any(beyond > edge for beyond, edge in pairs)
    # Language models predict the first token of a sample from the position before it, if there is padding.
    lengths = [min(width, width - first + 1) if is_left else last for first, last in zip(firsts, lasts, strict=True)]
    names = tuple(
        name
        for name, tensor, axis in _tensors(whole)
        if axis is not None and axis.dim == 0 and axis.rows == 1 and not axis.offsets and tensor.dim() > 1
        and tensor.shape[1] == width
    )  # fmt: skip
    kind = tuple(shown), names, is_left, has_labels_in_padding
    # A sample without any token, or whose labels are all ignored, keeps one position: a model needs at least one.
    return Padding(whole, width, tuple(max(1, length) for length in lengths), is_left, names, kind)


def _ends(valid: Sequence[Tensor]) -> Tensor:
    """The first valid position of every sample and the end of its last one; (width, 0) for one of padding only."""
    anywhere = valid[0]
    for other in valid[1:]:
        anywhere = anywhere | other
    marks, width = anywhere.to(torch.uint8), anywhere.shape[1]
    has_any = anywhere.any(1)
    return torch.stack([marks.argmax(1).where(has_any, width), (width - marks.flip(1).argmax(1)).where(has_any, 0)])


def _tensors(whole: Microbatch) -> Iterator[tuple[str, Tensor, SampleAxis | None]]:
    """The tensors of a batch by name, each with the way in which it is split; None if it is passed whole."""
    target = () if whole.target is None else ((TARGET, whole.target),)
    for argument, value in (*zip(whole.names, whole.args, strict=True), *whole.kwargs.items(), *target):
        for name, leaf in [(argument, value)] if isinstance(value, Tensor) else named_leaves(value, argument):
            if isinstance(leaf, Tensor):
                yield name, leaf, whole.axes.get(name)
