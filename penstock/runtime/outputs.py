"""Outputs: what the last stage made, merged over the microbatches and brought to every rank."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from penstock.ir.containers import leaves, put_together, take_apart
from penstock.runtime.crew import Crew
from penstock.runtime.delivery import read_header, write_header
from penstock.runtime.merge import merge


class Outputs:
    """Shares outputs from the rank of the last stage."""

    def __init__(self, crew: Crew, source: int) -> None:
        self._crew, self._source = crew, source

    def shared(self, outputs: Sequence[Any], sizes: Sequence[int], weights: Sequence[float] | None) -> Any:
        """The outputs of the whole batch on every rank; containers that only the model knows come as dicts."""
        if self._crew.is_alone:
            return merge(outputs, sizes, weights)
        if self._crew.rank == self._source:
            merged = merge(outputs, sizes, weights)
            header, tensors = write_header(_plain(merged))
            self._crew.tell_text(header, self._source)
            for tensor in tensors:
                dist.broadcast(tensor, group=self._crew.group, group_src=self._source)
            return merged
        build, buffers = read_header(self._crew.tell_text("", self._source))
        for buffer in buffers:
            dist.broadcast(buffer, group=self._crew.group, group_src=self._source)
        return build(buffers)


def _plain(thing: Any) -> Any:
    """The same built of lists, tuples and dicts; what is neither tensor nor plain is left out."""
    parts = take_apart(thing)
    if parts is None:
        return thing if len(leaves(thing)) == 1 and _is_known(thing) else None
    items = [_plain(item) for item in parts.items]
    if parts.kind in (list, tuple):
        return put_together(parts.kind, parts.keys, items)
    return {str(key): item for key, item in zip(parts.keys, items, strict=True)}


def _is_known(leaf: object) -> bool:
    return hasattr(leaf, "shape") or leaf is None or type(leaf) in (bool, int, float, str)
