"""Checksum: a number that tells batches apart, so that ranks can compare theirs."""

import zlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def checksum(batches: Iterable[Mapping[str, object]]) -> int:
    """Differs, with very high probability, when any number in any tensor, or any plain value, differs; never 0."""
    found = 1
    for batch in batches:
        for name, leaf in batch.items():
            if isinstance(leaf, Tensor):
                found = zlib.crc32(f"{name} {leaf.dtype} {tuple(leaf.shape)}".encode(), found)
                content = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                found = zlib.crc32(content.numpy().data, found)
            elif type(leaf) in _PLAIN:
                found = zlib.crc32(f"{name} {leaf!r}".encode(), found)
    return found or 1
