"""A picture as plain shapes in pixels, and the SVG and PNG files made from it."""

import io
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

from jinja2 import Environment, Template

from penstock.errors import ViewError
from penstock.views.base import check_positive
from penstock.views.palette import PAPER

Point = tuple[float, float]
Format = Literal["svg", "png"]
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


def check_format(image_format: str, scale: float) -> None:
    """Raise ViewError for options that `image` cannot follow."""
    if image_format not in ("svg", "png"):
        raise ViewError("format must be svg or png", format=repr(image_format))
    check_positive(scale=scale)


def image(drawing: Drawing, title: str, image_format: Format, scale: float) -> str | bytes:
    """The drawing as SVG text, or as PNG bytes with `scale` image pixels per pixel of the drawing."""
    return svg_document(drawing, title) if image_format == "svg" else png_document(drawing, scale)


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
