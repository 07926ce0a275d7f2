"""Frame: where the parts of a flow stand in a picture, stage under stage."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from penstock.ir import Value
from penstock.views.drawing import text_width
from penstock.views.flow import Flow
from penstock.views.parts import shown
from penstock.views.routes import Routes

MARGIN, TOP = 14.0, 62.0
SIZE, SMALL = 11.0, 9.5
BLOCK, GLUE, FREE, TAG = 36.0, 20.0, 32.0, 13.0
GAP, CUT_LINE, HEAD, FOOT = 24.0, 13.0, 22.0, 17.0
LANE, MOST_LANES = 9.0, 500.0
LEFT_WIDEST = 280.0
NARROWEST, WIDEST = 270.0, 470.0
STACK = 6.0
"""how far the edges of further repetitions stand out below a part"""


class Spot(NamedTuple):
    """A rectangle."""

    x: float
    y: float
    width: float
    height: float

    @property
    def right(self) -> float:
        """The x of its right edge."""
        return self.x + self.width

    @property
    def bottom(self) -> float:
        """The y of its lower edge."""
        return self.y + self.height


@dataclass(frozen=True)
class Frame:
    """The columns, from left to right: what depends on inputs only, its lanes, the parts, labels, lanes of skips."""

    routes: Routes

    @property
    def flow(self) -> Flow:
        """What is drawn."""
        return self.routes.flow

    @cached_property
    def left_width(self) -> float:
        """The pixels of the left column: 0 where nothing stands there or is named."""
        widest = 0.0
        for place, part in enumerate(self.flow.parts):
            texts = self.flow.captions(place) if part.is_free else map(input_text, self.flow.inputs_of(part))
            widest = max([widest, *(text_width(text, SMALL) + 16 for text in texts)])
        return min(LEFT_WIDEST, widest)

    @cached_property
    def lane(self) -> tuple[float, float]:
        """The pixels between the lanes at the left and at the right."""
        counts = [1 + max((trunk.lane for trunk in side), default=0) for side in (self.routes.left, self.routes.right)]
        return min(LANE, MOST_LANES / counts[0]), min(LANE, MOST_LANES / counts[1])

    @cached_property
    def middle(self) -> tuple[float, float]:
        """The x of the left edge of the middle column, and its width."""
        lanes = len({trunk.lane for trunk in self.routes.left})
        left = self.left_width + (lanes + 2) * self.lane[0] if self.left_width else 0.0
        texts = [text for place in self.routes.column[:-1] for text in self.flow.captions(place)]
        width = max((text_width(text, SIZE) for text in texts), default=0.0) + 20
        return MARGIN + left + 10, min(WIDEST, max(NARROWEST, width))

    @cached_property
    def lanes_x(self) -> float:
        """Where the lanes at the right begin; before them there is room for labels."""
        labels = [text_width(trunk.wire.text, SMALL) for trunk in self.routes.right]
        return sum(self.middle) + (max(labels) + 20 if labels else 0.0)

    @cached_property
    def width(self) -> float:
        """The pixels of the whole picture."""
        lanes = len({trunk.lane for trunk in self.routes.right})
        return self.lanes_x + lanes * self.lane[1] + 10 + MARGIN

    @cached_property
    def bands(self) -> dict[int, Spot]:
        """Where each stage stands, if there are several."""
        found: dict[int, Spot] = {}
        x = self.middle[0] - 10
        for stage in range(self.flow.partition.num_stages):
            own = [place for place in self.routes.column[:-1] if self.flow.parts[place].stage == stage]
            rows = [self.spots[place] for first in own for place in (first, *self.routes.beside[first])]
            if not rows:  # a stage of nothing but what depends on inputs
                continue
            top, bottom = min(spot.y for spot in rows) - HEAD, max(spot.bottom for spot in rows) + FOOT
            found[stage] = Spot(x, top, self.width - MARGIN - x, bottom - top)
        return found if self.flow.partition.num_stages > 1 else {}

    @property
    def height(self) -> float:
        """The pixels down to the end of the outputs."""
        return self.spots[self.flow.outputs].bottom + MARGIN

    @property
    def spots(self) -> dict[int, Spot]:
        """Where each part stands, by place, and where the outputs."""
        return self._standing[0]

    @property
    def tags(self) -> dict[int, float]:
        """By place, the y of the first of the names of inputs beside a part."""
        return self._standing[1]

    @cached_property
    def _standing(self) -> tuple[dict[int, Spot], dict[int, float]]:
        spots: dict[int, Spot] = {}
        tags: dict[int, float] = {}
        (x, width), y, stage = self.middle, TOP, -1
        for place in self.routes.column:
            y += self._room_above(place, stage)
            stage = self._stage(place)
            height, left = self._height(place), self._left_height(place)
            row = max(height, left)
            spots[place] = Spot(x, y + (row - height) / 2, width, height)
            stack = y + (row - left) / 2
            for free in self.routes.beside[place]:
                spots[free] = Spot(MARGIN, stack, self.left_width, self._free_height(free))
                stack = spots[free].bottom + 6
            tags[place] = stack + TAG / 2
            y += row
        return spots, tags

    def _stage(self, place: int) -> int:
        return self.flow.parts[place].stage if place < self.flow.outputs else self.flow.partition.num_stages

    def _room_above(self, place: int, above: int) -> float:
        """The pixels between a row and the one above, which is of the given stage."""
        own = self._stage(place)
        if above == own or self.flow.partition.num_stages == 1:
            return GAP if above >= 0 else 0.0
        head = HEAD if place < self.flow.outputs else 0.0
        return head if above < 0 else FOOT + 12 + CUT_LINE * self.num_arriving(own) + head

    def num_arriving(self, stage: int) -> int:
        """How many stages send to a stage."""
        return sum(crossing.consumer == stage for crossing in self.flow.crossings)

    def _height(self, place: int) -> float:
        entering, leaving = self.routes.rights_of(place)
        sides = max(5 * len(entering) + 12 * len(leaving), 5 * len(self.routes.lefts_of(place)))
        if place == self.flow.outputs:
            return max(GLUE, sides + 6)
        part = self.flow.parts[place]
        return max(GLUE if part.is_glue else BLOCK, sides + 6) + (STACK if part.times > 1 else 0)

    def _free_height(self, place: int) -> float:
        return max(FREE, 5.0 * len(self.routes.lefts_of(place)) + 6)

    def _left_height(self, place: int) -> float:
        tags = len(self.flow.inputs_of(self.flow.parts[place])) if place < self.flow.outputs else 0
        return sum(self._free_height(free) + 6 for free in self.routes.beside[place]) + TAG * tags


def input_text(value: Value) -> str:
    """An input of the graph, as it is named beside its reader."""
    return f"{shown(value.name)}: {value.spec}"
