"""Timeline: one trace, or several on one scale of time, as a drawing with a row per rank."""

from dataclasses import dataclass

from penstock.ir import Kind, Span, critical_path
from penstock.views.base import Document, Drawn, Traces, check_positive, named
from penstock.views.blocks import WORDS, Blocks
from penstock.views.boxes import boxes
from penstock.views.drawing import Box, Drawing, Label, Line, Point, text_width
from penstock.views.marks import LANE, are_marked, marks
from penstock.views.merged import are_merged, merged
from penstock.views.palette import FAINT, IDLE, INK, MARK, fill
from penstock.views.panel import MARGIN, SIZE, Panel, panels, surroundings

ROW, LEAST_ROW, PANEL_HEIGHT = 24.0, 3.0, 800.0
PAIR = 1.4
SWATCH = 13.0
Entry = tuple[tuple[str, ...], str]


@dataclass(frozen=True)
class Timeline(Drawn[Document]):
    """The options and the layout that the picture of a timeline has in every file format."""

    width: int = 1200
    """pixels of the whole picture"""
    columns: int = 1
    """how many traces stand side by side before the next line of them begins"""
    critical: bool = False
    """whether the critical path is marked"""

    def __post_init__(self) -> None:
        check_positive(width=self.width, columns=self.columns)

    def drawing(self, traces: Traces) -> Drawing:
        """The picture, in pixels."""
        shown = named(traces)
        blocks = [Blocks.of(trace) for trace in shown.values()]
        most = max(trace.num_ranks for trace in shown.values())
        row = max(LEAST_ROW, min(ROW * (PAIR if any(b.has_pairs for b in blocks) else 1.0), PANEL_HEIGHT / most))
        placed, height = panels(list(shown.values()), (self.width, self.columns), row)
        if any(map(are_marked, blocks, placed)):
            placed, height = panels(list(shown.values()), (self.width, self.columns), row, lane=LANE)
        parts = []
        for panel, name, content in zip(placed, shown, blocks, strict=True):
            draw = merged if are_merged(content, panel) else boxes
            parts += [surroundings(panel, name, content.trace), draw(content, panel)]
            if are_marked(content, panel):
                parts.append(marks(content, panel))
            if self.critical:
                parts.append(critical_line(content, panel))
        legend, end = self._legend(blocks, height, any(map(are_merged, blocks, placed)))
        return Drawing(self.width, end).with_parts(*parts, legend)

    def _legend(self, blocks: list[Blocks], y: float, is_merged: bool) -> tuple[Drawing, float]:
        kinds = [kind for kind in WORDS if any(kind in content.kinds for content in blocks)]
        chunks = max(content.num_chunks for content in blocks)
        entries: list[Entry] = [((fill(kind, 0, 1),), WORDS[kind]) for kind in kinds]
        if chunks > 1:
            shades = tuple(fill(kinds[0] if kinds else Kind.FORWARD, c, chunks) for c in range(min(chunks, 8)))
            entries.append((shades, "first to last stage of a rank"))
        entries.append(((IDLE,), "idle"))
        if self.critical:
            entries.append(((), "critical path"))
        if is_merged:
            entries.append(((), "many passes: heights are shares of time"))
        return _legend_line(entries, self.width, y)


def _legend_line(entries: list[Entry], width: float, y: float) -> tuple[Drawing, float]:
    placed: list[Box] = []
    lines: list[Line] = []
    labels: list[Label] = []
    x = MARGIN
    for fills, words in entries:
        needed = SWATCH * max(1, len(fills)) + 6 + text_width(words, SIZE) + 14
        if x > MARGIN and x + needed > width:
            x, y = MARGIN, y + SWATCH + 6
        placed += [Box(x + SWATCH * n, y, SWATCH - 1, SWATCH, color) for n, color in enumerate(fills)]
        if words == "critical path":
            lines.append(Line(((x, y + SWATCH / 2), (x + SWATCH, y + SWATCH / 2)), MARK, 2))
        labels.append(Label(x + SWATCH * max(1, len(fills)) + 5, y + SWATCH / 2, words, INK if fills else FAINT, SIZE))
        x += needed
    return Drawing(0, 0, tuple(placed), (), tuple(lines), tuple(labels)), y + SWATCH + MARGIN


def critical_line(blocks: Blocks, panel: Panel) -> Drawing:
    """One line from the first item to the last: along the lower edge of a pass, across the rows with a message."""
    points: list[Point] = []
    for item in critical_path(blocks.trace):
        first, last = (item.rank, item.rank) if isinstance(item, Span) else (item.source, item.target)
        points += [_point(panel, first, item.start), _point(panel, last, item.end)]
    return Drawing(0, 0, lines=(Line(tuple(points), MARK, 2),) if points else ())


def _point(panel: Panel, rank: int, seconds: float) -> Point:
    return panel.at(seconds), panel.top(rank) + panel.row - panel.gap / 2
