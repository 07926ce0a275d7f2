"""model: a graph as a self-contained SVG document: blocks from top to bottom, what flows between them, and the stages.

Choose it to see what a model consists of and where a partition cuts it. A box is a module with its class and
parameters; a slim one is the functions between modules; runs of like parts are drawn as one. Arrows carry shapes and
bytes; what passes by the next part runs at the right. At the left, in grey, stands what depends on inputs only: every
stage that reads it runs it, so that it is never sent. Stages are coloured, and above each stands what it receives.
"""

from dataclasses import dataclass

from penstock.ir import Graph, bytes_text, counted
from penstock.views.base import Staged, View, printable
from penstock.views.drawing import Box, Drawing, Label, Line, ending, shortened
from penstock.views.flow import Flow, sizes_text
from penstock.views.frame import CUT_LINE, HEAD, MARGIN, SIZE, SMALL, STACK, Frame, Spot
from penstock.views.palette import FAINT, IDLE, INK, PAPER, stage_color
from penstock.views.parts import Part, check_alike, shown
from penstock.views.routes import Routes
from penstock.views.svg_document import svg_document
from penstock.views.wiring import SHARE, Wiring

MOST_NAMED = 12
"""names of a list in what a pointer shows"""


@dataclass(frozen=True)
class Model(View[Staged, str]):
    """SVG text."""

    alike: int = 4
    """how many like parts in a row are drawn as one; 0: every node by itself"""
    title: str = "model"
    name = "model"
    noun = Graph
    suffix = ".svg"

    def __post_init__(self) -> None:
        check_alike(self.alike)

    def __call__(self, subject: Staged) -> str:
        title = printable(self.title)
        return svg_document(_drawing(Frame(Routes(Flow.of(subject, self.alike))), title), title)


def _drawing(frame: Frame, title: str) -> Drawing:
    flow = frame.flow
    parts = [_head(frame, title), *(_band(frame, stage) for stage in frame.bands)]
    for place, part in enumerate(flow.parts):
        parts.append((_free if part.is_free else _part)(flow, place, frame.spots[place]))
    parts += [_outputs(flow, frame.spots[flow.outputs]), Wiring(frame).drawing()]
    return Drawing(max(frame.width, 560), frame.height).with_parts(*parts)


def _head(frame: Frame, title: str) -> Drawing:
    flow, width = frame.flow, max(frame.width, 560) - 2 * MARGIN
    nodes = flow.graph.nodes
    lines = [f"{counted(len(nodes), 'node')}, {flow.weight(nodes)}"]
    if frame.bands:
        total = sum(crossing.forward_bytes for crossing in flow.crossings)
        lines[0] += f"; {flow.partition.num_stages} stages, {bytes_text(total)} sent forward per microbatch"
    if any(part.is_free for part in flow.parts):
        lines.append("grey: depends on inputs only; run by every stage that reads it, never sent")
    texts = [Label(MARGIN, 35 + 14 * n, shortened(line, SMALL, width), FAINT, SMALL) for n, line in enumerate(lines)]
    return Drawing(0, 0, labels=(Label(MARGIN, 18, shortened(title, 14, width), INK, 14), *texts))


def _band(frame: Frame, stage: int) -> Drawing:
    """The ground of a stage, its name and parameters, and above it what it receives."""
    spot, flow = frame.bands[stage], frame.flow
    own = [flow.graph[name] for name in flow.partition.stages[stage]]
    arriving = [crossing for crossing in flow.crossings if crossing.consumer == stage]
    x, y = spot.x + 18 + SHARE * frame.middle[1], spot.y - 5 - CUT_LINE * (len(arriving) - 0.5)
    head = Label(x, spot.y + HEAD / 2, f"stage {stage}: {flow.weight(own)}", INK, SIZE)
    labels = [
        Label(x, y + CUT_LINE * number, f"from stage {crossing.producer}: {text}", INK, SMALL)
        for number, crossing in enumerate(arriving)
        for text in [f"{sizes_text(crossing.values)}; gradients {bytes_text(crossing.backward_bytes)}"]
    ]
    return Drawing(0, 0, (Box(*spot, stage_color(stage, 0.88)),), labels=(head, *labels))


def _part(flow: Flow, place: int, spot: Spot) -> Drawing:
    part = flow.parts[place]
    border = stage_color(part.stage, 0.3)
    color = PAPER if part.is_glue else stage_color(part.stage, 0.62)
    boxes: list[Box] = []
    if part.times > 1:
        spot = spot._replace(height=spot.height - STACK)
        boxes = [Box(spot.x + 8, spot.bottom, spot.width - 16, STACK, border)]
        boxes.append(Box(spot.x + 4, spot.bottom, spot.width - 8, STACK / 2, stage_color(part.stage, 0.45)))
    boxes.append(Box(*spot, color, _tip(flow, part)))
    return Drawing(0, 0, tuple(boxes), lines=_outline(spot, border), labels=_texts(flow.captions(place), spot))


def _free(flow: Flow, place: int, spot: Spot) -> Drawing:
    lines = flow.captions(place)
    return Drawing(0, 0, (Box(*spot, IDLE, _tip(flow, flow.parts[place])),), labels=_texts(lines, spot, SMALL))


def _outputs(flow: Flow, spot: Spot) -> Drawing:
    names = ", ".join(map(printable, flow.graph.outputs[:MOST_NAMED]))
    return Drawing(0, 0, (Box(*spot, IDLE),), labels=_texts((f"outputs: {names}",), spot))


def _texts(lines: tuple[str, ...], spot: Spot, size: float = SIZE) -> tuple[Label, ...]:
    """Up to two lines: of a name the end is kept where it does not fit, of figures the beginning."""
    color, width = (FAINT if size == SMALL else INK), spot.width - 16
    y = spot.y + spot.height / 2 - 7 * (len(lines) - 1)
    if len(lines) == 1:
        return (Label(spot.x + 8, y, shortened(lines[0], SMALL, width), color, SMALL),)
    first = Label(spot.x + 8, y, ending(lines[0], size, width), color, size)
    return first, Label(spot.x + 8, y + 14, shortened(lines[1], SMALL, width), color, SMALL)


def _outline(spot: Spot, color: str) -> tuple[Line, ...]:
    corners = ((spot.x, spot.y), (spot.right, spot.y), (spot.right, spot.bottom), (spot.x, spot.bottom))
    return (Line((*corners, corners[0]), color),)


def _tip(flow: Flow, part: Part) -> str:
    """All that is known of a part."""
    stages = ", ".join(map(str, flow.stages_of(part)))
    names = _listed([shown(node.name) for node in part.nodes])
    reads = _listed([shown(name) for node in part.first for name in node.reads])
    makes = _listed([f"{shown(value.name)}: {value.spec}" for node in part.last for value in node.makes])
    lines = (part.kind, str(flow.weight(part.nodes)), f"stage {stages}", names, f"reads {reads}", f"makes {makes}")
    return "\n".join(lines)


def _listed(names: list[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
