"""Wiring: the wires of a flow as lines with arrows, along the routes and between the spots of a frame."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from penstock.views.drawing import Area, Drawing, Label, Line, Point, ending
from penstock.views.flow import sizes_text
from penstock.views.frame import MARGIN, SMALL, STACK, TAG, Frame, input_text
from penstock.views.palette import FAINT, INK, MARK, RULE, STAGES, mix
from penstock.views.routes import Trunk

SHARE = 0.28
"""where a straight wire stands in the width of a part"""
LINE = "#4b5563"
HEAD, DOT = 4.5, 3.0


@dataclass(frozen=True)
class Wiring:
    """All wires of a picture."""

    frame: Frame

    def drawing(self) -> Drawing:
        """Wires at the left, straight down, and at the right."""
        parts = [*self._straight(), *self._tags()]
        parts += [self._left(trunk) for trunk in self.frame.routes.left]
        parts += [self._right(trunk) for trunk in self.frame.routes.right]
        return Drawing(0, 0).with_parts(*parts)

    def _straight(self) -> Iterator[Drawing]:
        spots, column = self.frame.spots, self.frame.routes.column
        for above, below in pairwise(column):
            if values := self.frame.routes.straight.get(below):
                x = spots[above].x + SHARE * spots[above].width
                start, end = spots[above].bottom, spots[below].y
                line = Line(((x, start), (x, end - HEAD)), LINE, 1.2)
                head = Area(((x - HEAD + 1, end - HEAD - 1), (x + HEAD - 1, end - HEAD - 1), (x, end)), LINE)
                label = Label(x + 8, start + 9, sizes_text(values), INK, SMALL)
                yield Drawing(0, 0, areas=(head,), lines=(line,), labels=(label,))

    def _right(self, trunk: Trunk) -> Drawing:
        """Out of the source, down its lane, and into every target."""
        source = self.frame.spots[trunk.wire.source]
        x = self.frame.lanes_x + self.frame.lane[1] * trunk.lane
        ends = [(self.frame.spots[place].right, self._right_y(trunk, place)) for place in trunk.wire.targets]
        start = self._right_y(trunk, trunk.wire.source)
        label = Label(source.right + 8, start - 6, trunk.wire.text, INK, SMALL)
        return _branched((source.right, start), x, ends, self._color(trunk)).with_parts(Drawing(0, 0, labels=(label,)))

    def _color(self, trunk: Trunk) -> str:
        """With stages, a skip has the hue of the one that it comes from."""
        if not self.frame.bands:
            return LINE
        return mix(STAGES[self.frame.flow.parts[trunk.wire.source].stage % len(STAGES)], MARK, 0.2)

    def _right_y(self, trunk: Trunk, place: int) -> float:
        """Entering wires stand above leaving ones, whose labels need room."""
        spot = self.frame.spots[place]
        entering, leaving = self.frame.routes.rights_of(place)
        if trunk in entering:
            return spot.y + 5 + 5 * entering.index(trunk)
        repeated = place < self.frame.flow.outputs and self.frame.flow.parts[place].times > 1
        bottom = spot.bottom - (STACK if repeated else 0)
        return bottom - 4 - 12 * (len(leaving) - 1 - leaving.index(trunk))

    def _left(self, trunk: Trunk) -> Drawing:
        source = self.frame.spots[trunk.wire.source]
        x = source.right + self.frame.lane[0] * (1 + trunk.lane)
        ends = []
        for place in trunk.wire.targets:
            spot = self.frame.spots[place]
            ends.append((spot.right if spot.right < x else spot.x, self._left_y(trunk, place)))
        return _branched((source.right, self._left_y(trunk, trunk.wire.source)), x, ends, RULE)

    def _left_y(self, trunk: Trunk, place: int) -> float:
        spot, every = self.frame.spots[place], self.frame.routes.lefts_of(place)
        return spot.y + spot.height * (every.index(trunk) + 1) / (len(every) + 1)

    def _tags(self) -> Iterator[Drawing]:
        """The inputs of the graph that a part in the column reads, by name at its left."""
        flow = self.frame.flow
        for place in self.frame.routes.column[:-1]:
            spot, first = self.frame.spots[place], self.frame.tags[place]
            for number, value in enumerate(flow.inputs_of(flow.parts[place])):
                y, x = first + TAG * number, MARGIN + self.frame.left_width
                end = min(max(y, spot.y + 5), spot.bottom - 5)
                text = ending(input_text(value), SMALL, self.frame.left_width)
                drawing = _branched((x + 3, y), spot.x - 8, [(spot.x, end)], RULE)
                yield drawing.with_parts(Drawing(0, 0, labels=(Label(x, y, text, FAINT, SMALL, "end"),)))


def _branched(start: Point, x: float, ends: list[Point], color: str) -> Drawing:
    """A line from the start to the lane at x, along it, and from it to every end, with arrows."""
    lowest, highest = min(y for _, y in (start, *ends)), max(y for _, y in (start, *ends))
    lines = [Line((start, (x, start[1])), color), Line(((x, lowest), (x, highest)), color)]
    areas = []
    for end, y in ends:
        back = HEAD if x > end else -HEAD
        lines.append(Line(((x, y), (end + back, y)), color))
        areas.append(Area(((end + back, y - HEAD / 2 - 0.5), (end + back, y + HEAD / 2 + 0.5), (end, y)), color))
        if lowest < y < highest:  # a dot, to tell a branch from a crossing
            areas.append(Area(((x - DOT, y), (x, y - DOT), (x + DOT, y), (x, y + DOT)), color))
    return Drawing(0, 0, areas=tuple(areas), lines=tuple(lines))
