"""Still: the pictures of a page, which need no script: timelines with a box per pass, and memory in few steps."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from penstock.ir import Curve, Series, Trace
from penstock.views.blocks import WORDS, Blocks
from penstock.views.boxes import boxes
from penstock.views.drawing import Box, Drawing, Label, text_width
from penstock.views.marks import LANE, are_marked, marks
from penstock.views.memory import Memory
from penstock.views.palette import FAINT, fill
from penstock.views.panel import MARGIN, SIZE, panels, surroundings
from penstock.views.svg import Svg
from penstock.views.timeline import LEAST_ROW, PANEL_HEIGHT, ROW, critical_line

MAX_BOXES = 16_000
"""of a picture in which every pass has a box of its own, however narrow"""
MAX_STEPS, ALL_STEPS = 160, 1600
"""of the memory of a rank, and of all ranks together"""
LEAST_STEPS = 24


def timeline(traces: Mapping[str, Trace], width: int) -> Drawing:
    """The timelines on one scale of time; beyond MAX_BOXES passes are merged, as in every picture."""
    blocks = [Blocks.of(trace) for trace in traces.values()]
    if sum(map(len, blocks)) > MAX_BOXES:
        return Svg(width=width, critical=True).drawing(traces)
    every = list(traces.values())
    row = max(LEAST_ROW, min(ROW, PANEL_HEIGHT / max(trace.num_ranks for trace in every)))
    placed, height = panels(every, (width, 1), row)
    if any(map(are_marked, blocks, placed)):
        placed, height = panels(every, (width, 1), row, lane=LANE)
    parts = []
    for panel, name, content in zip(placed, traces, blocks, strict=True):
        parts += [surroundings(panel, name, content.trace), boxes(content, panel), critical_line(content, panel)]
        if are_marked(content, panel):
            parts.append(marks(content, panel))
    return Drawing(width, height + 2 * MARGIN).with_parts(*parts, _legend(blocks, height))


def _legend(blocks: list[Blocks], y: float) -> Drawing:
    x, swatches, labels = MARGIN, [], []
    for kind in (kind for kind in WORDS if any(kind in content.kinds for content in blocks)):
        swatches.append(Box(x, y, 12, 12, fill(kind, 0, 1)))
        labels.append(Label(x + 18, y + 6, WORDS[kind], FAINT, SIZE))
        x += 36 + text_width(WORDS[kind], SIZE)
    return Drawing(0, 0, tuple(swatches), labels=tuple(labels))


def memory(traces: Mapping[str, Trace], width: int, limits: tuple[int, ...]) -> Drawing | None:
    """What every rank holds over time; None where nothing is known of it."""
    rows = sum(trace.num_ranks for trace in traces.values())
    steps = max(LEAST_STEPS, min(MAX_STEPS, ALL_STEPS // rows))
    held = {
        name: replace(trace, memory=tuple(_thinned(curve, trace.makespan, steps) for curve in trace.memory))
        for name, trace in traces.items()
        if any(curve.peak for curve in trace.memory)
    }
    limit = limits[0] if len(set(limits)) == 1 else None
    return Memory(width=width, limit=limit).drawing(held) if held else None


def _thinned(curve: Curve, makespan: float, steps: int) -> Curve:
    """The most that is held in each of so many slices of the step."""
    seconds, held = curve.seconds.values, curve.held.values
    if len(seconds) <= steps or not makespan:
        return curve
    edges = np.linspace(0.0, makespan, steps, endpoint=False)
    inside = np.searchsorted(edges, seconds, side="right") - 1
    # What was held when a slice began counts as well.
    most = held[np.maximum(np.searchsorted(seconds, edges, side="right") - 1, 0)].copy()
    np.maximum.at(most, np.clip(inside, 0, steps - 1), held)
    return Curve(Series(edges), Series(most))
