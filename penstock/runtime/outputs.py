"""Outputs: what the last stage made, merged over the microbatches and brought to every rank."""

from collections.abc import Sequence
from typing import Any

import torch

from penstock.ir import leaves, put_together, take_apart
from penstock.runtime.delivery import refuse, share
from penstock.runtime.groups import ProcessGroups
from penstock.runtime.merge import merge


class Outputs:
    """Shares outputs from the rank of the last stage."""

    def __init__(self, groups: ProcessGroups, source: int, device: torch.device) -> None:
        self._groups, self._source, self._device = groups, source, device

    def shared(self, outputs: Sequence[Any], sizes: Sequence[int], weights: Sequence[float] | None) -> Any:
        """The outputs of the whole batch on every rank; containers that only the model knows come as dicts."""
        if self._groups.is_local:
            return merge(outputs, sizes, weights)
        if self._groups.rank != self._source:
            return share(self._groups, None, self._source, self._device)
        try:
            merged = merge(outputs, sizes, weights)
        except Exception as error:
            refuse(self._groups, error, self._source)
            raise
        share(self._groups, _plain(merged), self._source, self._device)
        return merged


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
