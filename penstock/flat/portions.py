"""Portions: the part of a flat model that this rank holds, as many entries or as many parameters as the others."""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

from torch import nn

from penstock.capture import microbatch_sizes
from penstock.errors import PartitionError
from penstock.flat.topology import topology
from penstock.ir import as_int

Entries = Iterable[Callable[..., Any]]


def partition_uniform(
    flat_sequence: Entries, num_stages: int | None = None, stage: int | None = None
) -> list[Callable[..., Any]]:
    """The entries of this rank: numbers alike to within one, the larger ones first.

    Without a number of stages and a stage, those are the pipeline of the topology and this rank's place in it.
    """
    entries, stages, stage = _asked(flat_sequence, num_stages, stage)
    bounds = list(accumulate(microbatch_sizes(len(entries), stages), initial=0))
    return entries[bounds[stage] : bounds[stage + 1]]


def partition_balanced(
    flat_sequence: Entries, num_stages: int | None = None, stage: int | None = None
) -> list[Callable[..., Any]]:
    """The entries of this rank: no way to cut makes the stage with the most parameters smaller.

    What is left free by that, such as functions without parameters, goes to earlier stages first.
    """
    entries, stages, stage = _asked(flat_sequence, num_stages, stage)
    bounds = _bounds([_size(entry) for entry in entries], stages)
    return entries[bounds[stage] : bounds[stage + 1]]


def _asked(
    flat_sequence: Entries, num_stages: int | None, stage: int | None
) -> tuple[list[Callable[..., Any]], int, int]:
    entries = list(flat_sequence)
    stages = topology.get_pp_size() if num_stages is None else as_int(num_stages)
    place = topology.get_pp_rank() if stage is None else as_int(stage)
    if stages is None or place is None or not 0 <= place < stages:
        raise PartitionError("no such stage", stage=repr(stage), stages=repr(num_stages))
    if len(entries) < stages:
        hint = "more entries: name the parts of a large module one by one"
        raise PartitionError("fewer entries than stages", entries=len(entries), stages=stages, hint=hint)
    return entries, stages, place


def _size(entry: Callable[..., Any]) -> int:
    return sum(parameter.numel() for parameter in entry.parameters()) if isinstance(entry, nn.Module) else 0


def _bounds(sizes: Sequence[int], stages: int) -> list[int]:
    """Where stages begin and the last one ends, so that the largest is as small as can be."""
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(_filled(sizes, stages, middle)) <= stages + 1:
            high = middle
        else:
            low = middle + 1
    return _filled(sizes, stages, low)


def _filled(sizes: Sequence[int], stages: int, limit: int) -> list[int]:
    """Stage after stage as full as the limit allows, unless those that follow would be left without an entry."""
    bounds, content = [0], 0
    for place, size in enumerate(sizes):
        is_needed_later = len(sizes) - place == stages - len(bounds)
        if place > bounds[-1] and (content + size > limit or is_needed_later):
            bounds.append(place)
            content = 0
        content += size
    return [*bounds, len(sizes)]
