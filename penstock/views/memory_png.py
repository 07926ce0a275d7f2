"""memory_png: the bytes that every rank holds over time, as a PNG image drawn by matplotlib.

Choose it where the SVG of `memory` cannot be shown. Needs the extra `plot`.
"""

from dataclasses import dataclass

from penstock.views.base import Traces, check_positive
from penstock.views.curves import Curves
from penstock.views.png_document import png_document


@dataclass(frozen=True)
class MemoryPng(Curves[bytes]):
    """PNG bytes."""

    scale: float = 2.0
    """pixels of the image per pixel of the layout; 2 is sharp on dense screens"""
    name = "memory_png"
    suffix = ".png"

    def __call__(self, traces: Traces) -> bytes:
        check_positive(scale=self.scale)
        return png_document(self.drawing(traces), self.scale)
