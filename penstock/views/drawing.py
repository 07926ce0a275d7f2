"""Drawing: a picture as plain shapes in pixels, written alike as SVG and as PNG."""

from dataclasses import dataclass
from typing import NamedTuple

Point = tuple[float, float]
# Widths of characters in font sizes, as in the widest of the common sans fonts.
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

    width: float
    height: float
    boxes: tuple[Box, ...] = ()
    areas: tuple[Area, ...] = ()
    lines: tuple[Line, ...] = ()
    labels: tuple[Label, ...] = ()

    def with_parts(self, *parts: "Drawing") -> "Drawing":
        """The same with the shapes of the others, where they stand."""
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


def shortened(text: str, size: float, width: float) -> str:
    """The text, cut off with dots where it would be wider."""
    if text_width(text, size) <= width:
        return text
    kept = text
    while kept and text_width(kept + "..", size) > width:
        kept = kept[:-1]
    return kept + ".." if kept else ""


def ending(text: str, size: float, width: float) -> str:
    """The text, cut off with dots at its beginning where it would be wider: of a dotted name the end tells most."""
    return shortened(text[::-1], size, width)[::-1]
