"""memory: the bytes that every rank holds over time, as a self-contained SVG document.

Choose it to see which rank fills up, when and by how much, against the limit of a device. The peak of a rank stands at
the right of its curve.
"""

from dataclasses import dataclass

from penstock.views.base import Traces
from penstock.views.curves import Curves
from penstock.views.svg_document import svg_document


@dataclass(frozen=True)
class Memory(Curves[str]):
    """SVG text."""

    name = "memory"
    suffix = ".svg"

    def __call__(self, traces: Traces) -> str:
        return svg_document(self.drawing(traces), "memory")
