"""The tensors that cross every cut of a partition, and the nodes and parameters that several stages hold instead.

Choose it to explain a partition: the values that one stage sends to another for each microbatch, their bytes forward,
and the bytes of the gradients that return. Further tables list the nodes that depend on inputs only, which stages run
again instead of receiving their results, and the parameters that several stages hold.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Group
from rich.text import Text

from penstock.ir import Crossing, Graph, bytes_text, counted
from penstock.views.base import RichView, Staged, short_name
from penstock.views.condense import CondensedGraph, Part
from penstock.views.table import TextTable

Row = tuple[str, ...]


@dataclass(frozen=True)
class Cuts(RichView[Staged]):
    """Markdown tables; `backward` is the gradient of the value, or `none` if it needs no gradient."""

    name = "cuts"
    record = Graph

    def __call__(self, subject: Staged) -> str:
        condensed = CondensedGraph.of(subject, 2)
        return "\n\n".join([_heading(condensed), *(table.markdown() for table in _tables(condensed))])

    def renderable(self, subject: Staged) -> Group:
        condensed = CondensedGraph.of(subject, 2)
        return Group(Text(_heading(condensed)), *(table.rich() for table in _tables(condensed)))


def _heading(condensed: CondensedGraph) -> str:
    crossings = condensed.crossings
    if condensed.partition.num_stages == 1:
        return "one stage: nothing crosses"
    tensors = sum(len(crossing.values) for crossing in crossings)
    counts = f"{counted(len(crossings), 'message')} of {counted(tensors, 'tensor')} per microbatch"
    forward = bytes_text(sum(crossing.forward_bytes for crossing in crossings))
    backward = bytes_text(sum(crossing.backward_bytes for crossing in crossings))
    return f"{condensed.partition.num_stages} stages, {counts}: {forward} forward, {backward} backward"


def _tables(condensed: CondensedGraph) -> Iterator[TextTable]:
    header = ("stages", "value", "made by", "tensor", "forward", "backward")
    if rows := [row for crossing in condensed.crossings for row in _crossing_rows(condensed, crossing)]:
        yield TextTable(header, tuple(rows), names=4)
    if condensed.partition.num_stages > 1:
        repeated = [part for part in condensed.parts if part.from_inputs and len(condensed.stages_of(part)) > 1]
        if rows := [_run_again(condensed, part) for part in repeated]:
            yield TextTable(("run again, not sent", "class", "stages", "bytes not sent"), tuple(rows), names=3)
        if rows := list(_shared_parameters(condensed)):
            yield TextTable(("held by several stages", "stages", "bytes"), tuple(rows), names=2)


def _crossing_rows(condensed: CondensedGraph, crossing: Crossing) -> Iterator[Row]:
    stages = f"{crossing.producer} -> {crossing.consumer}"
    for value in crossing.values:
        size = bytes_text(value.spec.bytes)
        maker = condensed.graph.makers[value.name]
        back = size if value.spec.requires_grad else "none"
        yield stages, short_name(value.name), short_name(maker.kind), str(value.spec), size, back
    if len(crossing.values) > 1:
        total = counted(len(crossing.values), "tensor")
        yield stages, f"= {total}", "", "", bytes_text(crossing.forward_bytes), bytes_text(crossing.backward_bytes)


def _run_again(condensed: CondensedGraph, part: Part) -> Row:
    """A part that several stages run, and the bytes of its values that would be sent if only its own stage ran it."""
    made = {value.name: value.spec.bytes for node in part.nodes for value in node.makes}
    sent: dict[tuple[str, int], int] = {}
    for node in condensed.graph.nodes:
        stage = condensed.partition.stage_of(node.name)
        for value in node.reads if not node.from_inputs else ():
            if value in made and stage != condensed.partition.stage_of(condensed.graph.makers[value].name):
                sent[value, stage] = made[value]
    stages = ", ".join(map(str, condensed.stages_of(part)))
    return part.title, part.kind, stages, bytes_text(sum(sent.values()))


def _shared_parameters(condensed: CondensedGraph) -> Iterator[Row]:
    """The parameters that nodes of several stages use, tied ones under their first name."""
    holders: dict[str, set[int]] = {}
    for node in condensed.graph.nodes:
        for name in node.parameters:
            holders.setdefault(condensed.graph.tensor_of(name), set()).add(condensed.partition.stage_of(node.name))
    sizes = {value.name: value.spec.bytes for value in condensed.graph.parameters}
    for name, stages in holders.items():
        if len(stages) > 1:
            yield short_name(name), ", ".join(map(str, sorted(stages))), bytes_text(sizes[name])
