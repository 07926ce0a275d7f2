"""svg: a timeline as a self-contained SVG document, for one trace or several on one scale of time.

Choose it for documents, reports and browsers: sharp at every size, and a pointer on a box shows its times. Colours are
kinds, lighter shades are later stages of a rank, grey is idle. Several traces stand one above the other, or side by
side with `columns`. Beyond 20,000 passes, or below 1.5 pixels per pass, passes are merged (see `merged.py`).
"""

from dataclasses import dataclass

from penstock.views.base import Traces, named
from penstock.views.svg_document import svg_document
from penstock.views.timeline import Timeline


@dataclass(frozen=True)
class Svg(Timeline[str]):
    """SVG text."""

    name = "svg"
    suffix = ".svg"

    def __call__(self, traces: Traces) -> str:
        return svg_document(self.drawing(traces), ", ".join(filter(None, named(traces))) or "timeline")
