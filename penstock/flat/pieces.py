"""Pieces: the inputs of a rank cut into microbatches, of which all ranks agree how many samples each has."""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor

from penstock.capture import microbatch_sizes
from penstock.errors import RunError
from penstock.flat.line import Line
from penstock.ir import as_int
from penstock.runtime import SyncRequest, SyncVote


class Pieces(NamedTuple):
    """Per microbatch its samples, and the parts of this rank's inputs."""

    sizes: tuple[int, ...]
    extras: tuple[tuple[Tensor, ...], ...]


def pieces_of(
    line: Line, request: SyncRequest, inputs: Tensor | Sequence[Tensor] | None, num_microbatches: int
) -> Pieces:
    """The pieces; all ranks meet here, and if one of them cannot go on, each one raises the same error."""
    try:
        given = [inputs] if isinstance(inputs, Tensor) else list(inputs or ())
        size = _size(line, given, num_microbatches)
    except RunError as error:
        raise line.refuse(request, error) from None
    # A rank without inputs says nothing about the size: minus infinity is never the largest.
    maxes = (-math.inf, -math.inf) if size is None else (float(size), -float(size))
    largest, smallest = line.agree(request, SyncVote(maxes=maxes)).maxes[:2]
    if largest != -smallest:
        found = (int(-smallest), int(largest))
        raise _shared(RunError("the ranks were given batches of different sizes", sizes=found))
    sizes = microbatch_sizes(int(largest), num_microbatches)
    starts = accumulate(sizes, initial=0)
    spans = list(zip(starts, sizes, strict=False))
    return Pieces(sizes, tuple(tuple(tensor.narrow(0, *span) for tensor in given) for span in spans))


def _size(line: Line, given: Sequence[Any], num_microbatches: int) -> int | None:
    """The samples of this rank's inputs; None for a rank without any."""
    count = as_int(num_microbatches)
    if count is None or count < 1:
        raise RunError("num_microbatches is a whole number, 1 or more", given=repr(num_microbatches))
    if not all(isinstance(tensor, Tensor) and tensor.dim() for tensor in given):
        found = [type(entry).__name__ for entry in given]
        raise RunError("inputs are tensors with the batch as their first dimension", found=found)
    if line.is_first and not given:
        raise RunError("the first rank of the pipeline needs inputs", hint="inputs=[samples]")
    sizes = {tensor.shape[0] for tensor in given}
    if len(sizes) > 1:
        raise RunError("the inputs of a rank have different numbers of samples", sizes=sorted(sizes))
    if sizes and min(sizes) < count:
        hint = f"num_microbatches={min(sizes)} on every rank" if min(sizes) else "leave out empty batches"
        raise RunError("fewer samples than microbatches", samples=min(sizes), microbatches=count, hint=hint)
    return sizes.pop() if sizes else None


def _shared(error: RunError) -> RunError:
    error.is_shared = True
    return error
