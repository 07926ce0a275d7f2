"""Curves: the memory of every rank over time as a drawing, all ranks on one scale of bytes."""

from dataclasses import dataclass

import numpy as np

from penstock.ir import Curve, Kind, Trace, bytes_text, parse_bytes
from penstock.views.base import Document, Drawn, Traces, check_positive, named
from penstock.views.drawing import Area, Drawing, Label, Line, Point
from penstock.views.palette import ALARM, FAINT, INK, KINDS, PAPER, RULE, mix
from penstock.views.panel import AXIS, MARGIN, SIZE, Panel, panels, surroundings

ROW, LEAST_ROW, PANEL_HEIGHT = 52.0, 9.0, 900.0
PEAKS = 78.0
HEADROOM = 1.08
SLICE = 2.0
LINE = KINDS[Kind.FORWARD]
GROUND = mix(LINE, PAPER, 0.45)


@dataclass(frozen=True)
class Curves(Drawn[Document]):
    """The options and the layout that the picture of the memory curves has in every file format."""

    width: int = 1000
    """pixels of the whole picture"""
    columns: int = 1
    """how many traces stand side by side before the next line of them begins"""
    limit: int | str | None = None
    """bytes that a rank has, `"24GiB"` also: drawn as a line, and what exceeds it in red"""

    def __post_init__(self) -> None:
        check_positive(width=self.width, columns=self.columns)
        if self.limit is not None:
            parse_bytes(self.limit)

    def drawing(self, traces: Traces) -> Drawing:
        """The picture, in pixels."""
        shown = named(traces)
        every = list(shown.values())
        limit = None if self.limit is None else parse_bytes(self.limit)
        row = max(LEAST_ROW, min(ROW, PANEL_HEIGHT / max(trace.num_ranks for trace in every)))
        placed, height = panels(every, (self.width, self.columns), row, right=PEAKS)
        top = HEADROOM * max(limit or 0, *(curve.peak for trace in every for curve in trace.memory))
        parts = []
        for panel, (name, trace) in zip(placed, shown.items(), strict=True):
            parts += [surroundings(panel, name or "memory", trace)]
            parts += [_rank(panel, trace, rank, (top or 1.0, limit)) for rank in range(trace.num_ranks)]
        note = f"every row is 0 to {bytes_text(top)}" if top else "the trace holds no figures of memory"
        note += f"; dashed: limit of {bytes_text(limit)}" if limit else ""
        caption = Label(MARGIN, height - MARGIN + 8, note, FAINT, SIZE)
        return Drawing(self.width, height - MARGIN + AXIS, labels=(caption,)).with_parts(*parts)


def _rank(panel: Panel, trace: Trace, rank: int, scale: tuple[float, int | None]) -> Drawing:
    top, limit = scale
    peak, floor = trace.peak_bytes(rank), panel.top(rank) + panel.row - panel.gap / 2
    pixels = (panel.row - panel.gap) / top
    outline = [(panel.at(x), floor - pixels * held) for x, held in _steps(trace.memory[rank], trace.makespan, panel)]
    ground = Area(((panel.x, floor), *outline, (panel.at(trace.makespan), floor)), GROUND)
    lines, areas, color = [Line(tuple(outline), LINE, 1.2)] if outline else [], [ground], INK
    if limit is not None:
        height = floor - pixels * limit
        lines.append(Line(((panel.x, height), (panel.x + panel.width, height)), ALARM, 1.0, dashed=True))
        if peak > limit:
            above = [(x, min(y, height)) for x, y in outline]
            areas.append(Area(((panel.x, height), *above, (panel.at(trace.makespan), height)), ALARM))
            color = ALARM
    lines.append(Line(((panel.x, floor), (panel.at(trace.makespan), floor)), RULE))
    size = min(10.0, 0.8 * panel.row)
    text = Label(panel.x + panel.width + 6, floor - panel.row / 2, f"{bytes_text(peak)}", color, size)
    return Drawing(0, 0, (), tuple(areas), tuple(lines), (text,))


def _steps(curve: Curve, makespan: float, panel: Panel) -> list[Point]:
    """The corners of the curve; where it changes more often than every SLICE pixels, the highest of each slice."""
    seconds, held = curve.seconds.values, curve.held.values
    if len(seconds) * SLICE > panel.width:
        slices = np.floor(seconds / (makespan or 1.0) * panel.width / SLICE).astype(np.int64)
        first = np.flatnonzero(np.diff(slices, prepend=-1))
        # What was held when the slice began counts as well.
        before = np.maximum(first - 1, 0)
        seconds, held = seconds[first], np.maximum(np.maximum.reduceat(held, first), held[before])
    x = np.repeat(np.append(seconds, makespan), 2)[1:-1]
    return list(zip(x.tolist(), np.repeat(held, 2).tolist(), strict=True))
