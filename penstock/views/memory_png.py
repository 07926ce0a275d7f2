"""memory_png: the bytes that every rank holds over time, as a PNG image drawn by matplotlib.

Choose it where the SVG of `memory` cannot be shown. Needs the extra `plot`.
"""

from dataclasses import dataclass

from penstock.views.curves import Curves
from penstock.views.png_document import Painted


@dataclass(frozen=True)
class MemoryPng(Painted, Curves[bytes]):
    """PNG bytes."""

    name = "memory_png"
