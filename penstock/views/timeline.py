"""One trace, or several on one scale of time, as an SVG or PNG picture with a row per rank.

Choose SVG for documents and browsers: sharp at every size, and a pointer on a box shows its times. Choose PNG where
SVG cannot be shown (it needs the extra `plot`). Colours are kinds, lighter shades are later stages of a rank, grey is
idle. Several traces are drawn below each other, or side by side with `columns`.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.ir import COMPUTE_KINDS, Kind, Span, critical_path, seconds_text
from penstock.views.bars import LOWER, UPPER, WHOLE, WORDS, Bars
from penstock.views.base import Traces, traces_by_name
from penstock.views.drawing import (
    LEAST_LABEL,
    MARGIN,
    SIZE,
    Box,
    Drawing,
    Label,
    Line,
    Panel,
    Point,
    TracePicture,
    draw_frame,
    place_panels,
    text_width,
)
from penstock.views.palette import FAINT, IDLE, INK, MARK, fill, text_on

ROW, LEAST_ROW, PANEL_HEIGHT = 24.0, 3.0, 800.0
PAIR = 1.4
"""height of a row in which passes overlap, in rows"""
SWATCH = 13.0
MAX_TIPS = 10_000
MAX_BOXES = 20_000
MIN_WIDTH = 1.5
"""pixels; narrower passes are merged"""
SLICE = 3.0
"""pixels of time that merged passes share at least"""
MARK_LANE, LEAST_MARKED_ROW, MARKED_BELOW, MARK_SPACE = 10.0, 8.0, 8.0, 9.0
"""pixels: of marks above a row, of the lowest row with marks, of the widest bar that needs a mark, between marks"""


@dataclass(frozen=True)
class Timeline(TracePicture):
    """SVG text, or PNG bytes."""

    width: int = 1200
    """pixels of the whole picture"""
    critical: bool = False
    """whether the critical path is marked, in traces that are not merged"""
    name = "timeline"

    def title(self, traces: Traces) -> str:
        return ", ".join(filter(None, traces_by_name(traces))) or "timeline"

    def drawing(self, traces: Traces, *, merge_narrow: bool = True) -> Drawing:
        """The picture, in pixels.

        More than MAX_BOXES passes are merged: the height of a colour is then its share of the time. So are passes
        narrower than MIN_WIDTH pixels, unless `merge_narrow` is False.
        """
        shown = traces_by_name(traces)
        bars = [Bars.of(trace) for trace in shown.values()]
        most = max(trace.num_ranks for trace in shown.values())
        row = max(LEAST_ROW, min(ROW * (PAIR if any(b.has_pairs for b in bars) else 1.0), PANEL_HEIGHT / most))
        panels, height = place_panels(list(shown.values()), self.width, self.columns, row)
        merged, marked = [], []
        for content, panel in zip(bars, panels, strict=True):
            # The median width of a box, in pixels.
            has_width = len(content) and panel.seconds
            width = float(np.median(content.end - content.start)) * panel.width / panel.seconds if has_width else 0.0
            is_narrow = merge_narrow and width < MIN_WIDTH and len(content) > panel.width
            merged.append(bool(has_width) and (len(content) > MAX_BOXES or is_narrow))
            # Half of the boxes are too narrow for their text, in rows that are high enough for marks above them.
            marked.append(not merged[-1] and panel.row >= LEAST_MARKED_ROW and 0 < width < MARKED_BELOW)
        # Marks need room above the rows, so the panels are placed a second time.
        if any(marked):
            panels, height = place_panels(list(shown.values()), self.width, self.columns, row, lane=MARK_LANE)
        parts = []
        for place, (panel, name, content) in enumerate(zip(panels, shown, bars, strict=True)):
            parts.append(draw_frame(panel, name, content.trace))
            parts.append(_merged_boxes(content, panel) if merged[place] else _boxes(content, panel))
            if marked[place]:
                parts.append(_marks(content, panel))
            # In a merged timeline the path would cross all rows at every pixel.
            if self.critical and not merged[place]:
                # Along the lower edge of a pass, across the rows with a message.
                points: list[Point] = []
                for item in critical_path(content.trace):
                    first, last = (item.rank, item.rank) if isinstance(item, Span) else (item.source, item.target)
                    for rank, seconds in ((first, item.start), (last, item.end)):
                        points.append((panel.at(seconds), panel.top(rank) + panel.row - panel.gap / 2))
                parts.append(Drawing(lines=(Line(tuple(points), MARK, 2),) if points else ()))
        legend, end = self._legend(bars, height, self.critical and not all(merged), any(merged))
        return Drawing(self.width, end).with_parts(*parts, legend)

    def _legend(self, bars: list[Bars], y: float, has_path: bool, is_merged: bool) -> tuple[Drawing, float]:
        """The legend from height y on, in as many lines as it needs, and the height below it."""
        kinds = [kind for kind in WORDS if any(kind in content.kinds for content in bars)]
        chunks = max(content.num_chunks for content in bars)
        entries: list[tuple[tuple[str, ...], str]] = [((fill(kind, 0, 1),), WORDS[kind]) for kind in kinds]
        if chunks > 1:
            shades = tuple(fill(kinds[0] if kinds else Kind.FORWARD, c, chunks) for c in range(min(chunks, 8)))
            entries.append((shades, "first to last stage of a rank"))
        entries.append(((IDLE,), "idle"))
        if has_path:
            entries.append(((), "critical path"))
        if is_merged:
            entries.append(((), "many passes: heights are shares of time"))
        swatches: list[Box] = []
        lines: list[Line] = []
        labels: list[Label] = []
        x = MARGIN
        for fills, words in entries:
            room = SWATCH * max(1, len(fills))
            needed = room + 6 + text_width(words, SIZE) + 14
            if x > MARGIN and x + needed > self.width:
                x, y = MARGIN, y + SWATCH + 6
            swatches += [Box(x + SWATCH * n, y, SWATCH - 1, SWATCH, color) for n, color in enumerate(fills)]
            if words == "critical path":
                lines.append(Line(((x, y + SWATCH / 2), (x + SWATCH, y + SWATCH / 2)), MARK, 2))
            labels.append(Label(x + room + 5, y + SWATCH / 2, words, INK if fills else FAINT, SIZE))
            x += needed
        return Drawing(0, 0, tuple(swatches), (), tuple(lines), tuple(labels)), y + SWATCH + MARGIN


# ------------------------------------------------------------------------------------------------ a box per pass


def _boxes(bars: Bars, panel: Panel) -> Drawing:
    """A box per bar, with the text that fits into it."""
    passes, placed = bars.passes, []
    for bar, (rank, half) in enumerate(zip(bars.rank.tolist(), bars.half.tolist(), strict=True)):
        start, end = float(bars.start[bar]), float(bars.end[bar])
        left, right = panel.at(start), panel.at(end)
        height = (panel.row - panel.gap) / (1 if half == WHOLE else 2)
        top = panel.top(rank) + panel.gap / 2 + (height if half == LOWER else 0.0)
        color = fill(int(passes.kind[bar]), int(bars.chunk[bar]), bars.num_chunks)
        tip = ""
        if len(bars) <= MAX_TIPS:
            what = f"{WORDS[Kind(int(passes.kind[bar]))]} of stage {passes.stage[bar]}"
            where = f"microbatch {passes.microbatch[bar]}, rank {rank}"
            tip = f"{what}, {where}: {seconds_text(start)} to {seconds_text(end)}"
        # A hairline of background separates neighbours of one colour; a bar of no length stays visible.
        width = max(0.8, right - left - (0.8 if right - left > 4 else 0.0))
        placed.append(Box(left, top, width, height - (0.6 if half == UPPER else 0.0), color, tip))
    # The stage is written where it fits into three of four boxes: a mixture would be read wrongly.
    fitting = sum(_font_size(box, label) > 0 for box, label in zip(placed, bars.labels, strict=True))
    texts: Sequence[str] = bars.labels
    if 4 * fitting < 3 * len(placed):
        pairs = zip(placed, bars.short_labels, strict=True)
        texts = [label if _font_size(box, label) else label[1:] for box, label in pairs]
    labels = [
        Label(box.x + box.width / 2, box.y + box.height / 2, text, text_on(box.fill), size, "middle")
        for box, text in zip(placed, texts, strict=True)
        if (size := _font_size(box, text))
    ]
    return Drawing(boxes=tuple(placed), labels=tuple(labels))


def _font_size(box: Box, text: str) -> float:
    """The font size at which the text fits; 0 where it would be too small to read."""
    size = min(SIZE, 0.75 * box.height, (box.width - 1.5) / text_width(text, 1.0)) if text else 0.0
    return size if size >= LEAST_LABEL else 0.0


# ---------------------------------------------------------------------------------- marks above boxes without text


def _marks(bars: Bars, panel: Panel) -> Drawing:
    """A stroke and the text of some passes, above the point where each starts.

    There is no room for all. Passes of rounder microbatches (0, 32, 16, 48, 8 ...) are placed before the others.
    """
    microbatch = bars.passes.microbatch
    # The largest power of 2 that divides the microbatch.
    roundness = np.where(microbatch > 0, microbatch & -microbatch, np.iinfo(np.int64).max)
    passes = np.flatnonzero(np.isin(bars.passes.kind, COMPUTE_KINDS))
    sequence = passes[np.lexsort((bars.start[passes], -roundness[passes]))]
    taken: list[list[tuple[float, float]]] = [[] for _ in range(panel.num_ranks)]
    lines, labels = [], []
    for bar in sequence.tolist():
        rank, text = int(bars.rank[bar]), bars.labels[bar]
        left = panel.at(float(bars.start[bar]))
        right = left + text_width(text, LEAST_LABEL) + MARK_SPACE
        # `taken` is sorted, so only the neighbours can be in the way.
        place, row = bisect_left(taken[rank], (left, right)), taken[rank]
        if (place and row[place - 1][1] > left) or (place < len(row) and right > row[place][0]):
            continue
        row.insert(place, (left, right))
        floor = panel.top(rank) + panel.gap / 2
        lines.append(Line(((left, floor - MARK_LANE + 2), (left, floor)), FAINT, 0.7))
        labels.append(Label(left + 1.5, floor - MARK_LANE / 2, text, INK, LEAST_LABEL))
    return Drawing(lines=tuple(lines), labels=tuple(labels))


# ----------------------------------------------------------------------------------- merged passes of a long trace


def _merged_boxes(bars: Bars, panel: Panel) -> Drawing:
    """Time in slices of whole pixels; in a slice the height of a colour is its share of the rank's time.

    The number of boxes stays below about MAX_BOXES (2 MB of SVG) however long the trace is.
    """
    colors, color_of = np.unique(bars.passes.kind * bars.num_chunks + bars.chunk, return_inverse=True)
    pairs = (divmod(color, bars.num_chunks) for color in colors.tolist())
    fills = [fill(kind, chunk, bars.num_chunks) for kind, chunk in pairs]
    pixels = int(np.ceil(max(SLICE, panel.width * len(colors) * panel.num_ranks / MAX_BOXES)))
    step, slices = panel.seconds * pixels / panel.width, int(np.ceil(panel.width / pixels))

    owner, row, column, filled = bars.coverage(step, slices)
    weight = np.where(bars.half[owner] == WHOLE, 1.0, 0.5)
    shape = (panel.num_ranks, slices, len(colors))
    place = np.ravel_multi_index((row // 2, column, color_of[owner]), shape)
    shares = np.minimum(np.bincount(place, filled * weight / step, int(np.prod(shape))), 1.0).reshape(shape)
    # Heights in half pixels, so that neighbouring slices come out equal and are drawn as one box.
    heights = np.round(2 * shares * (panel.row - panel.gap)) / 2

    boxes: list[Box] = []
    for rank in range(panel.num_ranks):
        edges = (np.flatnonzero((heights[rank, 1:] != heights[rank, :-1]).any(axis=1)) + 1).tolist()
        for first, last in zip((0, *edges), (*edges, slices), strict=True):
            left, right = panel.x + first * pixels, min(panel.x + last * pixels, panel.x + panel.width)
            top = panel.top(rank) + panel.gap / 2
            for height, color in zip(heights[rank, first].tolist(), fills, strict=True):
                if height:
                    boxes.append(Box(left, top, right - left, height, color))
                    top += height
    return Drawing(boxes=tuple(boxes))
