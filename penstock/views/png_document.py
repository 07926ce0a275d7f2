"""A Drawing as a PNG image, painted shape by shape with matplotlib."""

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import ViewError
from penstock.views.base import Drawn, Traces, check_positive
from penstock.views.drawing import Box, Drawing
from penstock.views.palette import PAPER

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DPI = 100
_POINTS = 72 / _DPI
_ANCHORS = {"start": "left", "middle": "center", "end": "right"}
MAX_PIXELS = 30_000


@dataclass(frozen=True)
class Painted(Drawn[bytes]):
    """What the views that are PNG images share: the option and the call, over a layout that says the drawing."""

    scale: float = 2.0
    """pixels of the image per pixel of the layout; 2 is sharp on dense screens"""
    suffix = ".png"

    def __call__(self, traces: Traces) -> bytes:
        check_positive(scale=self.scale)
        return png_document(self.drawing(traces), self.scale)


def png_document(drawing: Drawing, scale: float) -> bytes:
    """The image, with `scale` pixels per pixel of the drawing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        hint = "pip install penstock[plot]"
        raise ViewError("a PNG is drawn by matplotlib, which is not installed", hint=hint) from None
    if (longest := max(drawing.width, drawing.height) * scale) > MAX_PIXELS:
        raise ViewError("the image would be too large", pixels=round(longest), limit=MAX_PIXELS, hint="a smaller scale")
    figure = Figure(figsize=(drawing.width / _DPI, drawing.height / _DPI), dpi=_DPI * scale, facecolor=PAPER)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, drawing.width), ylim=(drawing.height, 0))
    axes.axis("off")
    _paint(axes, drawing)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _paint(axes: "Axes", drawing: Drawing) -> None:
    from matplotlib.collections import PolyCollection

    for shapes, order in (([_corners(box) for box in drawing.boxes], 1), ([a.points for a in drawing.areas], 2)):
        fills = [shape.fill for shape in (drawing.boxes if order == 1 else drawing.areas)]
        axes.add_collection(PolyCollection(shapes, facecolors=fills, linewidths=0, zorder=order), autolim=False)
    for line in drawing.lines:
        xs, ys = zip(*line.points, strict=True)
        dashes = (0, (5, 3)) if line.dashed else "solid"
        axes.plot(xs, ys, color=line.color, linewidth=line.width * _POINTS, linestyle=dashes, zorder=3)
    for label in drawing.labels:
        axes.text(
            label.x,
            label.y + 0.36 * label.size,
            label.text,
            color=label.color,
            fontsize=label.size * _POINTS,
            ha=_ANCHORS[label.anchor],
            va="baseline",
            zorder=4,
            parse_math=False,
        )


def _corners(box: Box) -> list[tuple[float, float]]:
    right, bottom = box.x + box.width, box.y + box.height
    return [(box.x, box.y), (right, box.y), (right, bottom), (box.x, bottom)]
