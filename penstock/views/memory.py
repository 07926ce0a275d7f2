"""The bytes that every rank holds over time, as an SVG or PNG picture.

Choose it to see which rank fills up, when and by how much, against the limit of a device. The peak of a rank is
written at the right of its curve.
"""

from dataclasses import dataclass

import numpy as np

from penstock.ir import Curve, Kind, Trace, bytes_text, parse_bytes
from penstock.views.base import Traces, traces_by_name
from penstock.views.drawing import (
    AXIS,
    MARGIN,
    SIZE,
    Area,
    Drawing,
    Label,
    Line,
    Panel,
    Point,
    TracePicture,
    draw_frame,
    place_panels,
)
from penstock.views.palette import ALARM, FAINT, INK, KIND_COLORS, PAPER, RULE, mix

ROW, LEAST_ROW, PANEL_HEIGHT = 52.0, 9.0, 900.0
PEAKS = 78.0
"""pixels at the right for the peaks"""
HEADROOM = 1.08
SLICE = 2.0
LINE = KIND_COLORS[Kind.FORWARD]
GROUND = mix(LINE, PAPER, 0.55)
"""lighter than every shade of a pass, as the report maps the two to different dark colours"""


@dataclass(frozen=True)
class Memory(TracePicture):
    """SVG text, or PNG bytes."""

    limit: int | str | None = None
    """bytes that a rank has, `"24GiB"` also: drawn as a line; memory above it is red"""
    name = "memory"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.limit is not None:
            parse_bytes(self.limit)

    def title(self, traces: Traces) -> str:
        return "memory"

    def drawing(self, traces: Traces, max_steps: int | None = None) -> Drawing:
        """The picture, in pixels; a curve has at most `max_steps` steps, or one per SLICE pixels."""
        shown = traces_by_name(traces)
        every = list(shown.values())
        limit = None if self.limit is None else parse_bytes(self.limit)
        row = max(LEAST_ROW, min(ROW, PANEL_HEIGHT / max(trace.num_ranks for trace in every)))
        panels, height = place_panels(every, self.width, self.columns, row, right=PEAKS)
        top = HEADROOM * max(limit or 0, *(curve.peak for trace in every for curve in trace.memory))
        parts = []
        for panel, (name, trace) in zip(panels, shown.items(), strict=True):
            steps = max_steps or int(panel.width / SLICE)
            parts.append(draw_frame(panel, name or "memory", trace))
            parts += [_draw_rank(panel, trace, rank, top or 1.0, limit, steps) for rank in range(trace.num_ranks)]
        # One scale for all rows, so that ranks can be compared by height.
        note = f"every row is 0 to {bytes_text(top)}" if top else "the trace has no memory curves"
        note += f"; dashed: limit of {bytes_text(limit)}" if limit else ""
        caption = Label(MARGIN, height - MARGIN + 8, note, FAINT, SIZE)
        return Drawing(self.width, height - MARGIN + AXIS, labels=(caption,)).with_parts(*parts)


def _draw_rank(panel: Panel, trace: Trace, rank: int, top: float, limit: int | None, steps: int) -> Drawing:
    """The curve of one rank, in a row whose height stands for `top` bytes."""
    peak, floor = trace.peak_bytes(rank), panel.top(rank) + panel.row - panel.gap / 2
    pixels = (panel.row - panel.gap) / top
    corners = _corners(trace.memory[rank], trace.makespan, steps)
    outline = [(panel.at(seconds), floor - pixels * held) for seconds, held in corners]
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


def _corners(curve: Curve, makespan: float, steps: int) -> list[Point]:
    """The corners of a curve; one that changes more often is reduced to the maximum of each of `steps` slices."""
    seconds, held = curve.seconds.values, curve.held.values
    if len(seconds) > steps:
        slices = np.floor(seconds / (makespan or 1.0) * steps).astype(np.int64)
        first = np.flatnonzero(np.diff(slices, prepend=-1))
        # The bytes held when the slice began count as well.
        before = np.maximum(first - 1, 0)
        seconds, held = seconds[first], np.maximum(np.maximum.reduceat(held, first), held[before])
    x = np.repeat(np.append(seconds, makespan), 2)[1:-1]
    return list(zip(x.tolist(), np.repeat(held, 2).tolist(), strict=True))
