"""Lanes: the timelines of a report as few numbers, for the script of the page that lets one zoom and point at them.

Times are whole ticks of the longest trace. A pass is one number for its kind, stage and microbatch, the ticks since the
end of the pass before it on its rank, and its own ticks. Traces of one program say what their passes are once.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.ir import Span, Trace, critical_path
from penstock.views.blocks import LETTERS, WORDS, Blocks
from penstock.views.page.theme import dark
from penstock.views.palette import fill, text_on
from penstock.views.panel import rank_label

TICKS = 100_000
MAX_PASSES = 16_000
"""of all traces together: about 150 KB"""


def lanes(traces: Mapping[str, Trace]) -> dict[str, Any] | None:
    """What the script reads; None where the passes are too many for it."""
    blocks = {name: Blocks.of(trace) for name, trace in traces.items()}
    if sum(map(len, blocks.values())) > MAX_PASSES:
        return None
    first = next(iter(blocks.values()))
    program = first.trace.program
    tick = max(trace.makespan for trace in traces.values()) / TICKS or 1.0
    kinds = tuple(dict.fromkeys(kind for content in blocks.values() for kind in content.kinds))
    fills = [[fill(kind, chunk, first.num_chunks) for chunk in range(first.num_chunks)] for kind in kinds]
    sizes = (program.num_stages, max(trace.program.num_microbatches for trace in traces.values()))
    codes = [_codes(content, kinds, sizes) for content in blocks.values()]
    return {
        "tick": tick,
        "kinds": [(LETTERS[kind], WORDS[kind]) for kind in kinds],
        "sizes": sizes,
        "chunks": _chunks(program.placement.stages, program.num_stages),
        "light": fills,
        "dark": [[dark(color) for color in row] for row in fills],
        "inks": [[text_on(color) for color in row] for row in fills],
        "ranks": [rank_label(first.trace, rank) for rank in range(first.trace.num_ranks)],
        "traces": [
            _trace(name, content, tick, None if place and np.array_equal(own, codes[0]) else own)
            for place, ((name, content), own) in enumerate(zip(blocks.items(), codes, strict=True))
        ],
    }


def _chunks(stages: tuple[tuple[int, ...], ...], num_stages: int) -> list[int]:
    place = [0] * num_stages
    for held in stages:
        for chunk, stage in enumerate(held):
            place[stage] = chunk
    return place


def _codes(blocks: Blocks, kinds: Sequence[int], sizes: Sequence[int]) -> NDArray[np.int64]:
    """Kind, stage and microbatch in one number, rank by rank."""
    number_of = {int(kind): number for number, kind in enumerate(kinds)}
    number = np.asarray([number_of[kind] for kind in blocks.passes.kind.tolist()], dtype=np.int64)
    code = (number * sizes[0] + blocks.passes.stage) * sizes[1] + blocks.passes.microbatch
    return np.asarray(code[_sequence(blocks)], dtype=np.int64)


def _sequence(blocks: Blocks) -> NDArray[np.int64]:
    return np.lexsort((blocks.half, blocks.start, blocks.rank))


def _trace(name: str, blocks: Blocks, tick: float, codes: NDArray[np.int64] | None) -> dict[str, Any]:
    sequence = _sequence(blocks)
    rank = blocks.rank[sequence]
    start = np.round(blocks.start[sequence] / tick).astype(np.int64)
    end = np.round(blocks.end[sequence] / tick).astype(np.int64)
    is_first = np.diff(rank, prepend=-1) != 0
    before = np.where(is_first, 0, np.concatenate(([0], end[:-1])))
    found: dict[str, Any] = {
        "name": name,
        "end": round(blocks.trace.makespan / tick),
        "counts": np.bincount(rank, minlength=blocks.trace.num_ranks).tolist(),
        "gaps": (start - before).tolist(),
        "lengths": (end - start).tolist(),
        "path": _path(blocks.trace, tick),
    }
    if codes is not None:
        found["codes"] = codes.tolist()
    if blocks.has_pairs:
        found["halves"] = blocks.half[sequence].tolist()
    return found


def _path(trace: Trace, tick: float) -> list[int]:
    """Rank and tick at which each item of the critical path begins, and at which it ends."""
    points: list[int] = []
    for item in critical_path(trace):
        ranks = (item.rank, item.rank) if isinstance(item, Span) else (item.source, item.target)
        points += (ranks[0], round(item.start / tick), ranks[1], round(item.end / tick))
    return points
