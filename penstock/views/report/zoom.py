"""The timelines of a report as compact numbers, for the script of the page that zooms into them.

Times are integer ticks of the longest trace. A pass is one number for its kind, stage and microbatch, the ticks since
the end of the previous pass on its rank, and its own ticks. Traces of one program share the list of their passes.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.ir import Span, Trace, critical_path
from penstock.views.blocks import LETTERS, WORDS, Blocks
from penstock.views.palette import fill, text_on
from penstock.views.panel import rank_label
from penstock.views.report.charts import MAX_PASSES, dark

TICKS = 100_000


def zoom_data(traces: Mapping[str, Trace]) -> dict[str, Any] | None:
    """The data that report.js reads; None where the passes are too many for it."""
    blocks = {name: Blocks.of(trace) for name, trace in traces.items()}
    if sum(map(len, blocks.values())) > MAX_PASSES:
        return None
    first = next(iter(blocks.values()))
    tick = max(trace.makespan for trace in traces.values()) / TICKS or 1.0
    kinds = tuple(dict.fromkeys(kind for content in blocks.values() for kind in content.kinds))
    fills = [[fill(kind, chunk, first.num_chunks) for chunk in range(first.num_chunks)] for kind in kinds]
    sizes = (first.trace.program.num_stages, max(trace.program.num_microbatches for trace in traces.values()))

    number_of = {int(kind): number for number, kind in enumerate(kinds)}
    shared: NDArray[np.int64] | None = None
    entries = []
    for name, content in blocks.items():
        sequence = np.lexsort((content.half, content.start, content.rank))
        entry = _trace_entry(name, content, sequence, tick)
        number = np.asarray([number_of[kind] for kind in content.passes.kind.tolist()], dtype=np.int64)
        codes = ((number * sizes[0] + content.passes.stage) * sizes[1] + content.passes.microbatch)[sequence]
        if shared is None or not np.array_equal(codes, shared):
            entry["codes"] = codes.tolist()
        shared = codes if shared is None else shared
        entries.append(entry)
    return {
        "tick": tick,
        "kinds": [(LETTERS[kind], WORDS[kind]) for kind in kinds],
        "sizes": sizes,
        "chunks": first.chunk_of_stage.tolist(),
        "light": fills,
        "dark": [[dark(color) for color in row] for row in fills],
        "inks": [[text_on(color) for color in row] for row in fills],
        "ranks": [rank_label(first.trace, rank) for rank in range(first.trace.num_ranks)],
        "traces": entries,
    }


def _trace_entry(name: str, blocks: Blocks, sequence: NDArray[np.int64], tick: float) -> dict[str, Any]:
    """One trace; `sequence` orders its blocks by rank and start."""
    rank = blocks.rank[sequence]
    start = np.round(blocks.start[sequence] / tick).astype(np.int64)
    end = np.round(blocks.end[sequence] / tick).astype(np.int64)
    # Differences between neighbours are short numbers, which keeps the page small.
    is_first = np.diff(rank, prepend=-1) != 0
    before = np.where(is_first, 0, np.concatenate(([0], end[:-1])))
    # Rank and tick at which each item of the critical path begins, and at which it ends.
    path: list[int] = []
    for item in critical_path(blocks.trace):
        ranks = (item.rank, item.rank) if isinstance(item, Span) else (item.source, item.target)
        path += (ranks[0], round(item.start / tick), ranks[1], round(item.end / tick))
    entry: dict[str, Any] = {
        "name": name,
        "end": round(blocks.trace.makespan / tick),
        "counts": np.bincount(rank, minlength=blocks.trace.num_ranks).tolist(),
        "gaps": (start - before).tolist(),
        "lengths": (end - start).tolist(),
        "path": path,
    }
    if blocks.has_pairs:
        entry["halves"] = blocks.half[sequence].tolist()
    return entry
