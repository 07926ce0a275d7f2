"""A graph as an SVG picture: its modules from top to bottom, the tensors between them, and the stages.

Choose it to see the structure of a model and where a partition cuts it. A box is a module with its class and
parameters; a slim box is the functions between modules; runs of equal parts are one box. Arrows carry shapes and
bytes; a tensor that skips the next part runs along the right. Inputs of the model, and tensors that are computed from
inputs alone (never sent, every stage computes them itself), are named at the left of their readers.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from penstock.ir import Graph, bytes_text, counted, listed, printable
from penstock.views.base import Staged, View, short_name
from penstock.views.condense import CondensedGraph, Connection, NodeGroup, check_collapse, values_text
from penstock.views.drawing import (
    Area,
    Box,
    Drawing,
    Label,
    Line,
    Point,
    cut_beginning,
    cut_end,
    svg_document,
    text_width,
)
from penstock.views.palette import FAINT, IDLE, INK, MARK, PAPER, RULE, STAGE_COLORS, mix, stage_color

# Lengths in pixels: the edge of the picture, and where boxes begin below the title.
MARGIN, TOP = 14.0, 62.0
# Font sizes.
SIZE, SMALL = 11.0, 9.5
# Heights of the box of a module, of a slim box, and of a line of text at the left of a box.
BLOCK, GLUE, TAG = 36.0, 20.0, 13.0
# Between boxes; at the top and the bottom of a stage; per line of tensors between stages.
GAP, BAND_HEAD, BAND_FOOT, CUT_LINE = 24.0, 22.0, 17.0, 13.0
# The width of the vertical line of one skip, and of all of them.
LANE, MAX_LANES_WIDTH = 9.0, 500.0
# Widths of boxes, of the texts at their left, and of the picture.
NARROWEST, WIDEST, WIDEST_TAGS, LEAST_WIDTH = 270.0, 470.0, 280.0, 560.0
STACK = 6.0
"""height of the edges below a box that stands for several parts"""
ARROW_X = 0.28
"""position of the straight arrows in the width of a box"""
ARROW_COLOR = "#4b5563"
HEAD, DOT = 4.5, 3.0
MAX_NAMES = 12
"""names in a list of a tooltip"""


@dataclass(frozen=True)
class Model(View[Staged, str]):
    """SVG text."""

    collapse: int = 4
    """number of equal parts in a row from which they are drawn as one; 0 draws every node"""
    title: str = "model"
    """shown above the picture"""
    name = "model"
    record = Graph
    suffix = ".svg"

    def __post_init__(self) -> None:
        check_collapse(self.collapse)

    def __call__(self, subject: Staged) -> str:
        title = printable(self.title, one_line=True)
        return svg_document(_Layout(CondensedGraph.of(subject, self.collapse)).draw(title), title)


class _Layout:
    """One column of boxes, tags at its left and skips at its right.

    A place is the index of a part in `condensed.parts`; that of the outputs comes after all parts. A tag names an input
    of a box. A skip is a connection that does not go to the next box; it runs in a lane, a vertical line.
    """

    def __init__(self, condensed: CondensedGraph) -> None:
        self.condensed = condensed
        self.has_stages = condensed.partition.num_stages > 1
        # Parts that depend on inputs only get no box: a mask that every layer reads would be connected to all of them.
        self.column = [place for place, part in enumerate(condensed.parts) if not part.from_inputs]
        self.column.append(condensed.outputs)
        self.tags = {place: self._tags(place) for place in self.column}
        self.lines = {place: self._lines(place) for place in self.column}
        self.straight, self.skips = self._routes()

        tags = [text_width(tag, SMALL) for texts in self.tags.values() for tag in texts]
        texts = [text_width(line, SIZE) for lines in self.lines.values() for line in lines]
        labels = [text_width(values_text(skip.values), SMALL) + 20 for skip, _ in self.skips]
        lanes = 1 + max((lane for _, lane in self.skips), default=-1)
        self.tags_width = min(WIDEST_TAGS, max(tags, default=0.0))
        self.x = MARGIN + self.tags_width + (24 if tags else 10)
        self.width = min(WIDEST, max([NARROWEST, *(text + 16 for text in texts)]))
        self.lane = min(LANE, MAX_LANES_WIDTH / max(1, lanes))
        self.lanes_x = self.x + self.width + max(labels, default=0.0)
        self.right = self.lanes_x + lanes * self.lane + 10
        self.boxes, self.bands = self._place()

    def _tags(self, place: int) -> list[str]:
        """The inputs that a part reads, and the values among those it reads that are computed from inputs alone."""
        if place == self.condensed.outputs:
            return []
        graph = self.condensed.graph
        read = dict.fromkeys(value for node in self.condensed.parts[place].first for value in node.reads)
        tags = [f"{short_name(value.name)}: {value.spec}" for value in graph.inputs if value.name in read]
        computed = [name for name in read if name in graph.makers and graph.makers[name].from_inputs]
        for spec, count in Counter(str(graph.spec(name)) for name in computed).items():
            tags.append(f"from inputs: {f'{count} × ' if count > 1 else ''}{spec}")
        return tags

    def _lines(self, place: int) -> tuple[str, ...]:
        """The lines of text in a box."""
        condensed = self.condensed
        if place == condensed.outputs:
            names = [printable(name, one_line=True) for name in condensed.graph.outputs]
            return (f"outputs: {listed(names, MAX_NAMES)}",)
        part = condensed.parts[place]
        if part.is_glue:
            scope = f" in {short_name(part.nodes[0].module)}" if part.nodes[0].module else ""
            is_read = any(connection.source == place for connection in condensed.connections)
            return (f"{part.kind}{scope}{'' if is_read else ', read by no other part'}",)
        size = condensed.parameter_size(part.first)
        each = f", {'each ' if part.times > 1 else ''}{size}" if size.num_parameters else ""
        return part.title, part.kind + each

    def _routes(self) -> tuple[dict[int, list[Connection]], list[tuple[Connection, int]]]:
        """The connections that go straight to the next box, by target; and the skips with the lane of each."""
        below = dict(pairwise(self.column))
        straight: dict[int, list[Connection]] = {}
        skips = []
        for connection in self.condensed.connections:
            if connection.source not in below:
                continue  # computed from inputs: a tag at the reader
            following = below[connection.source]
            if following in connection.targets:
                straight.setdefault(following, []).append(connection)
            if further := tuple(target for target in connection.targets if target != following):
                skips.append(connection._replace(targets=further))
        # Each in the innermost lane that is free over its length; short ones first, so that long ones go around them.
        lanes: list[list[tuple[int, int]]] = []
        placed = []
        for skip in sorted(skips, key=lambda skip: (skip.targets[-1] - skip.source, skip.source)):
            low, high = skip.source, skip.targets[-1]
            lane = next((n for n, used in enumerate(lanes) if all(high < a or b < low for a, b in used)), len(lanes))
            if lane == len(lanes):
                lanes.append([])
            lanes[lane].append((low, high))
            placed.append((skip, lane))
        return straight, sorted(placed, key=lambda pair: pair[0].source)

    def _place(self) -> tuple[dict[int, Box], dict[int, Box]]:
        """The boxes of all parts and of the outputs, and the background of every stage."""
        boxes: dict[int, Box] = {}
        bands: dict[int, Box] = {}
        y, above = TOP, -1
        for place in self.column:
            is_output = place == self.condensed.outputs
            stage = self.condensed.partition.num_stages if is_output else self.condensed.parts[place].stage
            if stage == above or not self.has_stages:
                y += GAP if boxes else 0.0
            else:
                # Between two stages there is room for a line per stage that sends to the lower one.
                arriving = sum(crossing.consumer == stage for crossing in self.condensed.crossings)
                y += BAND_FOOT + 12 + CUT_LINE * arriving if boxes else 0.0
                y += 0.0 if is_output else BAND_HEAD
            above = stage
            entering, leaving = self._skips_at(place)
            is_slim = is_output or self.condensed.parts[place].is_glue
            is_stack = not is_output and self.condensed.parts[place].times > 1
            # Every skip has its own height at the right edge, with room for a label if it leaves.
            height = max(GLUE if is_slim else BLOCK, 5 * len(entering) + 12 * len(leaving) + 6)
            row = max(height + (STACK if is_stack else 0.0), TAG * len(self.tags[place]))
            color = IDLE if is_output else PAPER if is_slim else stage_color(stage, 0.62)
            boxes[place] = Box(self.x, y + (row - height) / 2, self.width, height, color)
            if self.has_stages and not is_output:
                band = bands.get(stage)
                top = band.y if band else y - BAND_HEAD
                left = self.x - 10
                bands[stage] = Box(left, top, self.right - left, y + row + BAND_FOOT - top, stage_color(stage, 0.88))
            y += row
        return boxes, bands

    def _skips_at(self, place: int) -> tuple[list[Connection], list[Connection]]:
        """The skips that enter and that leave a box."""
        every = [skip for skip, _ in self.skips]
        return [s for s in every if place in s.targets], [s for s in every if s.source == place]

    # ------------------------------------------------------------------------------------------------------ drawing

    def draw(self, title: str) -> Drawing:
        """The whole picture."""
        width = max(self.right + MARGIN, LEAST_WIDTH)
        height = self.boxes[self.condensed.outputs].y + self.boxes[self.condensed.outputs].height + MARGIN
        condensed, room = self.condensed, width - 2 * MARGIN
        text = f"{counted(len(condensed.graph.nodes), 'node')}, {condensed.parameter_size(condensed.graph.nodes)}"
        if self.has_stages:
            total = bytes_text(sum(crossing.forward_bytes for crossing in condensed.crossings))
            text += f"; {condensed.partition.num_stages} stages, {total} sent forward per microbatch"
        labels = [Label(MARGIN, 18, cut_end(title, 14, room), INK, 14)]
        labels.append(Label(MARGIN, 35, cut_end(text, SMALL, room), FAINT, SMALL))
        if any(part.from_inputs for part in condensed.parts):
            note = "from inputs: computed from the inputs alone by every stage that reads it, never sent"
            labels.append(Label(MARGIN, 49, cut_end(note, SMALL, room), FAINT, SMALL))
        parts = [self._draw_band(stage, band) for stage, band in self.bands.items()]
        parts += [self._draw_box(place) for place in self.column]
        parts += [self._draw_straight(*pair) for pair in pairwise(self.column)]
        parts += [self._draw_skip(skip, lane) for skip, lane in self.skips]
        return Drawing(width, height, labels=tuple(labels)).with_parts(*parts)

    def _draw_band(self, stage: int, band: Box) -> Drawing:
        """The background of a stage, its parameters, and above it the tensors that it receives."""
        condensed = self.condensed
        nodes = [condensed.graph[name] for name in condensed.partition.stages[stage]]
        x = self.x + ARROW_X * self.width + 8
        labels = [Label(x, band.y + BAND_HEAD / 2, f"stage {stage}: {condensed.parameter_size(nodes)}", INK, SIZE)]
        arriving = [crossing for crossing in condensed.crossings if crossing.consumer == stage]
        for number, crossing in enumerate(arriving):
            y = band.y - 5 - CUT_LINE * (len(arriving) - number - 0.5)
            sizes = f"{values_text(crossing.values)}; gradients {bytes_text(crossing.backward_bytes)}"
            labels.append(Label(x, y, f"from stage {crossing.producer}: {sizes}", INK, SMALL))
        return Drawing(boxes=(band,), labels=tuple(labels))

    def _draw_box(self, place: int) -> Drawing:
        """A box with its text, and at its left the inputs that it reads."""
        box, lines = self.boxes[place], self.lines[place]
        room, bottom = box.width - 16, box.y + box.height
        middle = box.y + box.height / 2
        y = middle - 7 * (len(lines) - 1)
        if len(lines) == 1:
            labels = [Label(box.x + 8, y, cut_end(lines[0], SMALL, room), INK, SMALL)]
        else:
            labels = [Label(box.x + 8, y, cut_beginning(lines[0], SIZE, room), INK, SIZE)]
            labels.append(Label(box.x + 8, y + 14, cut_end(lines[1], SMALL, room), INK, SMALL))
        boxes, outline = [box], Drawing()
        if place != self.condensed.outputs:
            part = self.condensed.parts[place]
            border = stage_color(part.stage, 0.3)
            boxes = [box._replace(tip=self._tooltip(part))]
            if part.times > 1:
                edges = Box(box.x + 8, bottom, box.width - 16, STACK, border)
                boxes += [edges, Box(box.x + 4, bottom, box.width - 8, STACK / 2, stage_color(part.stage, 0.45))]
            right = box.x + box.width
            corners = ((box.x, box.y), (right, box.y), (right, bottom), (box.x, bottom), (box.x, box.y))
            outline = Drawing(lines=(Line(corners, border),))
        arrows = []
        for number, tag in enumerate(self.tags[place]):
            y = middle + TAG * (number - (len(self.tags[place]) - 1) / 2)
            end = min(max(y, box.y + 5), bottom - 5)
            text = cut_beginning(tag, SMALL, self.tags_width)
            labels.append(Label(MARGIN + self.tags_width, y, text, FAINT, SMALL, "end"))
            arrows.append(_branch((MARGIN + self.tags_width + 3, y), box.x - 8, [(box.x, end)], RULE))
        return Drawing(boxes=tuple(boxes), labels=tuple(labels)).with_parts(outline, *arrows)

    def _draw_straight(self, above: int, below: int) -> Drawing:
        """The arrow from one box to the next, if the next part reads a value of it."""
        if below not in self.straight:
            return Drawing()
        upper, lower = self.boxes[above], self.boxes[below]
        x, start, end = upper.x + ARROW_X * upper.width, upper.y + upper.height, lower.y
        start += STACK if self.condensed.parts[above].times > 1 else 0.0
        line = Line(((x, start), (x, end - HEAD)), ARROW_COLOR, 1.2)
        head = Area(((x - HEAD + 1, end - HEAD - 1), (x + HEAD - 1, end - HEAD - 1), (x, end)), ARROW_COLOR)
        values = [value for connection in self.straight[below] for value in connection.values]
        label = Label(x + 8, start + 9, values_text(values), INK, SMALL)
        return Drawing(0, 0, (), (head,), (line,), (label,))

    def _draw_skip(self, skip: Connection, lane: int) -> Drawing:
        """A line in a lane at the right from the source to all targets, in the colour of the source's stage."""
        source = self.boxes[skip.source]
        stage = self.condensed.parts[skip.source].stage
        color = mix(STAGE_COLORS[stage % len(STAGE_COLORS)], MARK, 0.2) if self.has_stages else ARROW_COLOR
        leaving = self._skips_at(skip.source)[1]
        # Leaving lines start at the bottom of a box, with room for their labels; entering ones end at its top.
        y = source.y + source.height - 4 - 12 * (len(leaving) - 1 - leaving.index(skip))
        ends = []
        for target in skip.targets:
            box, entering = self.boxes[target], self._skips_at(target)[0]
            ends.append((box.x + box.width, box.y + 5 + 5 * entering.index(skip)))
        label = Label(source.x + source.width + 8, y - 6, values_text(skip.values), INK, SMALL)
        line = _branch((source.x + source.width, y), self.lanes_x + self.lane * lane, ends, color)
        return line.with_parts(Drawing(labels=(label,)))

    def _tooltip(self, part: NodeGroup) -> str:
        """The tooltip of a box."""
        reads = listed([short_name(name) for node in part.first for name in node.reads], MAX_NAMES)
        made = [f"{short_name(value.name)}: {value.spec}" for node in part.last for value in node.makes]
        return "\n".join(
            (
                part.kind,
                str(self.condensed.parameter_size(part.nodes)),
                f"stage {part.stage}",
                listed([short_name(node.name) for node in part.nodes], MAX_NAMES),
                f"reads {reads}",
                f"makes {listed(made, MAX_NAMES)}",
            )
        )


def _branch(start: Point, x: float, ends: list[Point], color: str) -> Drawing:
    """A line from the start to the vertical at x, along it, and from it to every end, with arrow heads."""
    heights = [y for _, y in (start, *ends)]
    lines = [Line((start, (x, start[1])), color), Line(((x, min(heights)), (x, max(heights))), color)]
    areas = []
    for end, y in ends:
        back = HEAD if x > end else -HEAD
        lines.append(Line(((x, y), (end + back, y)), color))
        areas.append(Area(((end + back, y - HEAD / 2 - 0.5), (end + back, y + HEAD / 2 + 0.5), (end, y)), color))
        if min(heights) < y < max(heights):  # a dot distinguishes a branch from a crossing
            areas.append(Area(((x - DOT, y), (x, y - DOT), (x + DOT, y), (x, y + DOT)), color))
    return Drawing(areas=tuple(areas), lines=tuple(lines))
