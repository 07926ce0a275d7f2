"""Chart: a Drawing as SVG inside a page, in colours of the page's theme, with like shapes made one to be small."""

from collections.abc import Iterable, Iterator

from markupsafe import Markup, escape

from penstock.views.drawing import Box, Drawing, Label, Line, Point
from penstock.views.page.theme import word

OF_BOXES = ("#000000", "#ffffff")
"""texts in these stand on boxes, which keep their lightness on dark paper"""


def chart(drawing: Drawing, title: str) -> Markup:
    """The SVG element; it is as wide as the page allows."""
    size = f"{_short(drawing.width)} {_short(drawing.height)}"
    shapes = "".join((*_boxes(drawing.boxes), *_areas(drawing), *_lines(drawing.lines), *_labels(drawing.labels)))
    text = escape(title)
    # Every text among the shapes is escaped where it is written.
    return Markup(f'<svg viewBox="0 0 {size}" role="img" aria-label="{text}">{shapes}</svg>')


def colors_of(drawing: Drawing) -> Iterator[str]:
    """Every colour that needs a class."""
    yield from (box.fill for box in drawing.boxes)
    yield from (area.fill for area in drawing.areas)
    yield from (line.color for line in drawing.lines)
    yield from (label.color for label in drawing.labels)


def _boxes(boxes: Iterable[Box]) -> Iterator[str]:
    """Boxes of one colour, top and height as one thick dashed line: less than half the size of rectangles."""
    rows: dict[tuple[str, str, str], list[tuple[int, int]]] = {}
    for x, y, width, height, fill, _ in boxes:
        left = round(10 * x)
        rows.setdefault((fill, _short(y + height / 2), _short(height)), []).append(
            (left, round(10 * (x + width)) - left)
        )
    for (fill, middle, thickness), row in rows.items():
        steps = [f"M0 {middle}"]
        end = 0
        for left, length in row:
            steps.append(f"m{_tenths(left - end)} 0h{_tenths(length)}")
            end = left + length
        yield f'<path class="l {word(fill)}" stroke-width="{thickness}" d="{"".join(steps)}"/>'


def _tenths(value: int) -> str:
    return _short(value / 10)


def _areas(drawing: Drawing) -> Iterator[str]:
    for area in drawing.areas:
        yield f'<path class="{word(area.fill)}" d="{_walk(area.points)}z"/>'


def _lines(lines: Iterable[Line]) -> Iterator[str]:
    paths: dict[tuple[str, float, bool], list[str]] = {}
    for points, color, width, dashed in lines:
        paths.setdefault((color, width, dashed), []).append(_walk(points))
    for (color, width, dashed), path in paths.items():
        dashes = ' stroke-dasharray="5 3"' if dashed else ""
        yield f'<path class="l {word(color)}" stroke-width="{_short(width)}"{dashes} d="{"".join(path)}"/>'


def _walk(points: Iterable[Point]) -> str:
    """A path through the points; a point level with the one before it, or straight above, is one number."""
    before: tuple[str, str] | None = None
    steps = []
    for x, y in points:
        here = _short(x), _short(y)
        if before is None:
            steps.append(f"M{here[0]} {here[1]}")
        elif here != before:
            level, above = here[1] == before[1], here[0] == before[0]
            steps.append(f"H{here[0]}" if level else f"V{here[1]}" if above else f"L{here[0]} {here[1]}")
        before = here
    return "".join(steps)


def _labels(labels: Iterable[Label]) -> Iterator[str]:
    groups: dict[tuple[str, float, str], list[str]] = {}
    for x, y, text, color, size, anchor in labels:
        place = f'x="{_short(x)}" y="{_short(y + 0.36 * size)}"'
        groups.setdefault((color, round(size, 1), anchor), []).append(f"<text {place}>{escape(text)}</text>")
    for (color, size, anchor), texts in groups.items():
        paint = f'fill="{color}"' if color in OF_BOXES else f'class="{word(color)}"'
        yield f'<g {paint} font-size="{_short(size)}" text-anchor="{anchor}">{"".join(texts)}</g>'


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
