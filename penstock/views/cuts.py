"""cuts: what crosses every cut of a partition, tensor by tensor, and what is run again or held twice instead.

Choose it to explain a cut: which values one stage sends another for each microbatch, their bytes forward, and the bytes
of the gradients that return. Below stand the nodes that depend on inputs only, which stages run again instead of
sending what they make, and the parameters that several stages hold.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Group
from rich.text import Text

from penstock.ir import Crossing, Graph, bytes_text, counted
from penstock.views.base import RichView, Staged
from penstock.views.flow import Flow
from penstock.views.parts import Part, shown
from penstock.views.sheet import Sheet

Row = tuple[str, ...]


@dataclass(frozen=True)
class Cuts(RichView[Staged]):
    """Markdown tables; `backward` is the gradient of the value, `none` where it needs none."""

    name = "cuts"
    noun = Graph
    suffix = ".txt"

    def __call__(self, subject: Staged) -> str:
        flow = Flow.of(subject, 2)
        return "\n\n".join([_heading(flow), *(sheet.markdown() for sheet in _sheets(flow))])

    def renderable(self, subject: Staged) -> Group:
        flow = Flow.of(subject, 2)
        return Group(Text(_heading(flow)), *(sheet.rich() for sheet in _sheets(flow)))


def _heading(flow: Flow) -> str:
    crossings = flow.crossings
    if flow.partition.num_stages == 1:
        return "one stage: nothing crosses"
    tensors = sum(len(crossing.values) for crossing in crossings)
    counts = f"{counted(len(crossings), 'message')} of {counted(tensors, 'tensor')} per microbatch"
    return f"{flow.partition.num_stages} stages, {counts}: {_both(crossings)}"


def _both(crossings: tuple[Crossing, ...]) -> str:
    forward = sum(crossing.forward_bytes for crossing in crossings)
    backward = sum(crossing.backward_bytes for crossing in crossings)
    return f"{bytes_text(forward)} forward, {bytes_text(backward)} backward"


def _sheets(flow: Flow) -> Iterator[Sheet]:
    header = ("stages", "value", "made by", "tensor", "forward", "backward")
    if rows := [row for crossing in flow.crossings for row in _crossing(flow, crossing)]:
        yield Sheet(header, tuple(rows), names=4)
    if flow.partition.num_stages > 1:
        if rows := [_again(flow, part) for part in flow.parts if part.is_free and len(flow.stages_of(part)) > 1]:
            yield Sheet(("run again, not sent", "class", "stages", "bytes not sent"), tuple(rows), names=3)
        if rows := list(_shared(flow)):
            yield Sheet(("held by several stages", "stages", "bytes"), tuple(rows), names=2)


def _crossing(flow: Flow, crossing: Crossing) -> Iterator[Row]:
    stages = f"{crossing.producer} -> {crossing.consumer}"
    for value in crossing.values:
        size = bytes_text(value.spec.bytes)
        maker = flow.graph.makers[value.name]
        back = size if value.spec.requires_grad else "none"
        yield stages, shown(value.name), shown(maker.kind), str(value.spec), size, back
    if len(crossing.values) > 1:
        total = counted(len(crossing.values), "tensor")
        yield stages, f"= {total}", "", "", bytes_text(crossing.forward_bytes), bytes_text(crossing.backward_bytes)


def _again(flow: Flow, part: Part) -> Row:
    """The bytes are those of its values that other nodes read on stages that do not own it."""
    made = {value.name: value.spec.bytes for node in part.nodes for value in node.makes}
    sent: dict[tuple[str, int], int] = {}
    for node in flow.graph.nodes:
        stage = flow.partition.stage_of(node.name)
        for value in node.reads if not node.from_inputs else ():
            if value in made and stage != flow.partition.stage_of(flow.graph.makers[value].name):
                sent[value, stage] = made[value]
    stages = ", ".join(map(str, flow.stages_of(part)))
    return part.title, part.kind, stages, bytes_text(sum(sent.values()))


def _shared(flow: Flow) -> Iterator[Row]:
    """Parameters that nodes of several stages use, tied ones by their first name."""
    holders: dict[str, set[int]] = {}
    for node in flow.graph.nodes:
        for name in node.parameters:
            holders.setdefault(flow.graph.tensor_of(name), set()).add(flow.partition.stage_of(node.name))
    sizes = {value.name: value.spec.bytes for value in flow.graph.parameters}
    for name, stages in holders.items():
        if len(stages) > 1:
            yield shown(name), ", ".join(map(str, sorted(stages))), bytes_text(sizes[name])
