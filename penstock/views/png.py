"""png: a timeline as a PNG image, drawn by matplotlib, with the look of the SVG.

Choose it where SVG cannot be shown: README pages, slides, chats. Several traces make small multiples with `columns`.
Needs the extra `plot`.
"""

from dataclasses import dataclass

from penstock.views.png_document import Painted
from penstock.views.timeline import Timeline


@dataclass(frozen=True)
class Png(Painted, Timeline[bytes]):
    """PNG bytes."""

    name = "png"
