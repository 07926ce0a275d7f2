"""png: a timeline as a PNG image, drawn by matplotlib, with the look of the SVG.

Choose it where SVG cannot be shown: README pages, slides, chats. Several traces make small multiples with `columns`.
Needs the extra `plot`.
"""

from dataclasses import dataclass

from penstock.views.base import Traces, check_positive
from penstock.views.png_document import png_document
from penstock.views.timeline import Timeline


@dataclass(frozen=True)
class Png(Timeline[bytes]):
    """PNG bytes."""

    scale: float = 2.0
    """pixels of the image per pixel of the layout; 2 is sharp on dense screens"""
    name = "png"
    suffix = ".png"

    def __call__(self, traces: Traces) -> bytes:
        check_positive(scale=self.scale)
        return png_document(self.drawing(traces), self.scale)
