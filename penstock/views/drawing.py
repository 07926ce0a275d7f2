"""A picture as plain shapes in pixels, plots of traces in it, and the SVG and PNG files made from it."""

import io
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

import numpy as np
from jinja2 import Environment, Template

from penstock.errors import ViewError
from penstock.ir import Trace, number_text, percent_text, round_step, seconds_text, seconds_unit
from penstock.views.base import Traces, View, check_positive
from penstock.views.palette import FAINT, IDLE, INK, PAPER, RULE

Point = tuple[float, float]
MAX_PNG_PIXELS = 30_000
BASELINE = 0.36
"""distance from the middle of a text to its baseline, in font sizes"""

# Character widths in font sizes, as in the widest of the common sans fonts: a text never needs more room than this.
GLYPH, WIDE, NARROW = 0.64, 0.95, 0.4
_WIDE, _NARROW = frozenset("WMmw%"), frozenset(" .,:;|!'()ijlftr")


class Box(NamedTuple):
    """A filled rectangle; `tip` is shown when a pointer rests on it."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    tip: str = ""


class Area(NamedTuple):
    """A filled polygon."""

    points: tuple[Point, ...]
    fill: str


class Line(NamedTuple):
    """A line through points; not filled."""

    points: tuple[Point, ...]
    color: str
    width: float = 1.0
    dashed: bool = False


class Label(NamedTuple):
    """Text whose middle is at height y; `anchor` is start, middle or end."""

    x: float
    y: float
    text: str
    color: str
    size: float = 11.0
    anchor: str = "start"


@dataclass(frozen=True)
class Drawing:
    """Shapes from the back to the front: boxes, areas, lines, labels."""

    width: float = 0.0
    height: float = 0.0
    boxes: tuple[Box, ...] = ()
    areas: tuple[Area, ...] = ()
    lines: tuple[Line, ...] = ()
    labels: tuple[Label, ...] = ()

    def with_parts(self, *parts: "Drawing") -> "Drawing":
        """The same drawing with the shapes of the parts added at their own positions."""
        every = (self, *parts)
        return Drawing(
            self.width,
            self.height,
            tuple(box for part in every for box in part.boxes),
            tuple(area for part in every for area in part.areas),
            tuple(line for part in every for line in part.lines),
            tuple(label for part in every for label in part.labels),
        )


def text_width(text: str, size: float) -> float:
    """Pixels that the text takes in a common font."""
    return size * sum(WIDE if char in _WIDE else NARROW if char in _NARROW else GLYPH for char in text)


def cut_end(text: str, size: float, width: float) -> str:
    """The text, with its end replaced by dots if it is wider than `width` pixels."""
    if text_width(text, size) <= width:
        return text
    kept = text
    while kept and text_width(kept + "..", size) > width:
        kept = kept[:-1]
    return kept + ".." if kept else ""


def cut_beginning(text: str, size: float, width: float) -> str:
    """The text, with its beginning replaced by dots: the end of a dotted name is more specific."""
    return cut_end(text[::-1], size, width)[::-1]


# ------------------------------------------------------------------------------------------------ plots of traces


@dataclass(frozen=True)
class TracePicture(View[Traces, str | bytes]):
    """A view of traces as a picture: SVG text, or PNG bytes."""

    width: int = 1000
    """pixels of the whole picture"""
    columns: int = 1
    """number of traces side by side"""
    format: Literal["svg", "png"] = "svg"
    """the kind of picture: "svg", or "png" with matplotlib installed"""
    scale: float = 2.0
    """pixels of a PNG per pixel of the layout; 2 is sharp on dense screens"""
    record = Trace

    def __post_init__(self) -> None:
        check_positive(width=self.width, columns=self.columns, scale=self.scale)
        if self.format not in ("svg", "png"):
            raise ViewError("format must be svg or png", format=repr(self.format))

    @property
    def suffix(self) -> str:
        return f".{self.format}"

    def __call__(self, traces: Traces) -> str | bytes:
        drawing = self.drawing(traces)
        if self.format == "png":
            return png_document(drawing, self.scale)
        return svg_document(drawing, self.title(traces))

    @abstractmethod
    def drawing(self, traces: Traces) -> "Drawing":
        """The picture, in pixels."""

    @abstractmethod
    def title(self, traces: Traces) -> str:
        """The title of an SVG file."""


# Pixels: around a panel, for the title above it and the axis below it; font sizes.
MARGIN = 14.0
TITLE = 42.0
AXIS = 26.0
SIZE = 11.0
LEAST_LABEL = 7.0


@dataclass(frozen=True)
class Panel:
    """A plot with one row per rank: its left and top edge, its width, the seconds it spans, and the height of a row."""

    x: float
    y: float
    width: float
    seconds: float
    row: float
    num_ranks: int
    lane: float = 0.0
    """pixels above every row, for marks"""

    def at(self, seconds: float) -> float:
        """The x of a moment."""
        return self.x + (self.width * seconds / self.seconds if self.seconds else 0.0)

    def top(self, rank: int) -> float:
        """The y of the upper edge of a rank's row."""
        return self.y + (self.row + self.lane) * rank + self.lane

    @property
    def gap(self) -> float:
        """Pixels between two rows; the boxes of a row are centred in its height."""
        return min(4.0, 0.15 * self.row)

    @property
    def bottom(self) -> float:
        """The y below the last row."""
        return self.top(self.num_ranks) - self.lane


def place_panels(
    traces: Sequence[Trace], width: float, columns: int, row: float, *, right: float = 0.0, lane: float = 0.0
) -> tuple[list[Panel], float]:
    """One panel per trace in a picture of that width, all on one scale of time; and the height they take together.

    `right` pixels stay free at the right of every panel, and `lane` pixels above every row.
    """
    columns = min(columns, len(traces))
    left = max(text_width(rank_label(trace, trace.num_ranks - 1), SIZE) for trace in traces) + 8
    outer = (width - MARGIN * (columns + 1)) / columns
    seconds = max(trace.makespan for trace in traces)
    placed, y = [], MARGIN
    for first in range(0, len(traces), columns):
        line = traces[first : first + columns]
        for column, trace in enumerate(line):
            x = round(MARGIN + column * (outer + MARGIN) + left)
            plot = max(10.0, outer - left - right - 10)
            placed.append(Panel(x, y + TITLE, plot, seconds, row, trace.num_ranks, lane))
        y += TITLE + (row + lane) * max(trace.num_ranks for trace in line) + AXIS + MARGIN
    return placed, y


def rank_label(trace: Trace, rank: int) -> str:
    """The rank, and its stages where it holds several."""
    stages = trace.program.placement.stages[rank]
    if max(map(len, trace.program.placement.stages)) == 1:
        return f"rank {rank}"
    shown = ",".join(map(str, stages[:4])) + (",.." if len(stages) > 4 else "")
    return f"rank {rank}: {shown}"


def draw_frame(panel: Panel, name: str, trace: Trace) -> Drawing:
    """Title, rank labels and time axis of a panel, and the grey background of every row up to the end of the step."""
    end, height = panel.at(trace.makespan) - panel.x, panel.row - panel.gap
    rows = tuple(Box(panel.x, panel.top(rank) + panel.gap / 2, end, height, IDLE) for rank in range(panel.num_ranks))
    program = trace.program
    metrics = f"makespan {seconds_text(trace.makespan)}, bubble {percent_text(trace.bubble)}"
    counts = f"{program.num_ranks} ranks, {program.num_stages} stages, {program.num_microbatches} microbatches"
    if panel.width > text_width(f"{metrics}; {counts}", SIZE):
        metrics = f"{metrics}; {counts}"
    labels = [
        Label(panel.x, panel.y - 31, cut_end(name or "timeline", 14, panel.width), INK, 14),
        Label(panel.x, panel.y - 13, cut_end(metrics, SIZE, panel.width), FAINT, SIZE),
    ]
    # Rows lower than a text are labelled at intervals.
    every = max(1, int(np.ceil((LEAST_LABEL + 2) / panel.row)))
    size = min(SIZE, max(LEAST_LABEL, 0.8 * panel.row * every))
    labels += [
        Label(panel.x - 6, panel.top(rank) + panel.row / 2, rank_label(trace, rank), INK, size, "end")
        for rank in range(0, panel.num_ranks, every)
    ]
    scale, unit = seconds_unit(panel.seconds)
    step = round_step(panel.seconds / scale, panel.width / 70)
    ticks = np.arange(0, panel.seconds / scale * (1 + 1e-9), step).tolist()
    y = panel.bottom + 3
    axis = [Line(((panel.x, y), (panel.x + panel.width, y)), RULE)]
    for tick in ticks:
        x = panel.at(tick * scale)
        axis.append(Line(((x, y), (x, y + 4)), RULE))
        text = f"{number_text(tick, 4)} {unit}" if tick in (ticks[0], ticks[-1]) else number_text(tick, 4)
        labels.append(Label(x, y + 13, text, FAINT, 10, "middle"))
    return Drawing(boxes=rows, lines=tuple(axis), labels=tuple(labels))


# ------------------------------------------------------------------------------------------------------------- SVG

_SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{{ d.width|px }}" height="{{ d.height|px }}" \
viewBox="0 0 {{ d.width|px }} {{ d.height|px }}" font-family="DejaVu Sans, Verdana, Arial, sans-serif">
<title>{{ title }}</title>
<rect width="100%" height="100%" fill="{{ paper }}"/>
{% for b in d.boxes -%}
<rect x="{{ b.x|px }}" y="{{ b.y|px }}" width="{{ b.width|px }}" height="{{ b.height|px }}" fill="{{ b.fill }}"
{%- if b.tip %}><title>{{ b.tip }}</title></rect>{% else %}/>{% endif %}
{% endfor -%}
{% for a in d.areas -%}
<polygon points="{{ a.points|points }}" fill="{{ a.fill }}"/>
{% endfor -%}
{% for l in d.lines -%}
<polyline points="{{ l.points|points }}" fill="none" stroke="{{ l.color }}" stroke-width="{{ l.width|px }}"
{%- if l.dashed %} stroke-dasharray="5 3"{% endif %} stroke-linejoin="round"/>
{% endfor -%}
{% for t in d.labels -%}
<text x="{{ t.x|px }}" y="{{ (t.y + baseline * t.size)|px }}" font-size="{{ t.size|px }}" fill="{{ t.color }}"
{%- if t.anchor != "start" %} text-anchor="{{ t.anchor }}"{% endif %}>{{ t.text }}</text>
{% endfor -%}
</svg>
"""


def svg_document(drawing: Drawing, title: str) -> str:
    """The drawing as SVG text; every text in it is escaped."""
    return _svg_template().render(d=drawing, title=title, paper=PAPER, baseline=BASELINE)


@cache
def _svg_template() -> Template:
    environment = Environment(autoescape=True, keep_trailing_newline=True)
    environment.filters["px"] = _pixels
    environment.filters["points"] = lambda points: " ".join(f"{_pixels(x)},{_pixels(y)}" for x, y in points)
    return environment.from_string(_SVG)


def _pixels(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


# ------------------------------------------------------------------------------------------------------------- PNG

_DPI = 100
_POINTS = 72 / _DPI
_ANCHORS = {"start": "left", "middle": "center", "end": "right"}


def png_document(drawing: Drawing, scale: float) -> bytes:
    """The drawing as a PNG image, painted by matplotlib (the extra `plot`)."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.collections import PolyCollection
        from matplotlib.figure import Figure
    except ImportError:
        hint = "pip install penstock[plot]"
        raise ViewError("PNG images need matplotlib, which is not installed", hint=hint) from None
    if (longest := max(drawing.width, drawing.height) * scale) > MAX_PNG_PIXELS:
        pixels, limit = round(longest), MAX_PNG_PIXELS
        raise ViewError("the image would be too large", pixels=pixels, limit=limit, hint="a smaller scale")
    figure = Figure(figsize=(drawing.width / _DPI, drawing.height / _DPI), dpi=_DPI * scale, facecolor=PAPER)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, drawing.width), ylim=(drawing.height, 0))
    axes.axis("off")
    # One collection for all boxes: a timeline has thousands of them, and a patch each would take minutes.
    corners = [
        [(x, y), (x + width, y), (x + width, y + height), (x, y + height)]
        for x, y, width, height, _, _ in drawing.boxes
    ]
    polygons = [list(area.points) for area in drawing.areas]
    fills = [box.fill for box in drawing.boxes], [area.fill for area in drawing.areas]
    for order, (shapes, colors) in enumerate(zip((corners, polygons), fills, strict=True), start=1):
        axes.add_collection(PolyCollection(shapes, facecolors=colors, linewidths=0, zorder=order), autolim=False)
    for line in drawing.lines:
        xs, ys = zip(*line.points, strict=True)
        dashes = (0, (5, 3)) if line.dashed else "solid"
        axes.plot(xs, ys, color=line.color, linewidth=line.width * _POINTS, linestyle=dashes, zorder=3)
    for label in drawing.labels:
        axes.text(
            label.x,
            label.y + BASELINE * label.size,
            label.text,
            color=label.color,
            fontsize=label.size * _POINTS,
            ha=_ANCHORS[label.anchor],
            va="baseline",
            zorder=4,
            parse_math=False,
        )
    buffer = io.BytesIO()
    # Without the version of matplotlib the same drawing gives the same bytes.
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
