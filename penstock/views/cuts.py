"""The tensors that cross every cut of a partition, and the nodes and parameters that several stages hold instead.

Choose it to explain a partition: the values that one stage sends to another for each microbatch, their bytes forward,
and the bytes of the gradients that return. Further tables list the nodes that depend on inputs only, which stages run
again instead of receiving their results, and the parameters that several stages hold.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from penstock.ir import Graph, bytes_text, counted
from penstock.views.base import Staged, short_name
from penstock.views.condense import CondensedGraph, NodeGroup
from penstock.views.table import TableView, TextTable

Row = tuple[str, ...]


@dataclass(frozen=True)
class Cuts(TableView[Staged]):
    """Markdown tables; `backward` is the gradient of the value, or `none` if it needs no gradient."""

    name = "cuts"
    record = Graph

    def content(self, subject: Staged) -> tuple[Sequence[str], Iterable[TextTable]]:
        condensed = CondensedGraph.of(subject, 2)
        return [_heading(condensed)], _tables(condensed)


def _heading(condensed: CondensedGraph) -> str:
    """The number of messages and their bytes per microbatch, in one line."""
    crossings = condensed.crossings
    if condensed.partition.num_stages == 1:
        return "one stage: nothing crosses"
    tensors = sum(len(crossing.values) for crossing in crossings)
    counts = f"{counted(len(crossings), 'message')} of {counted(tensors, 'tensor')} per microbatch"
    forward = bytes_text(sum(crossing.forward_bytes for crossing in crossings))
    backward = bytes_text(sum(crossing.backward_bytes for crossing in crossings))
    return f"{condensed.partition.num_stages} stages, {counts}: {forward} forward, {backward} backward"


def _tables(condensed: CondensedGraph) -> Iterator[TextTable]:
    """The values that cross, the nodes that several stages run, and the parameters that several stages hold."""
    graph, partition = condensed.graph, condensed.partition
    rows: list[Row] = []
    for crossing in condensed.crossings:
        stages = f"{crossing.producer} -> {crossing.consumer}"
        for value in crossing.values:
            size, maker = bytes_text(value.spec.bytes), graph.makers[value.name]
            back = size if value.spec.requires_grad else "none"
            rows.append((stages, short_name(value.name), short_name(maker.kind), str(value.spec), size, back))
        if len(crossing.values) > 1:
            total = f"= {counted(len(crossing.values), 'tensor')}"
            sizes = bytes_text(crossing.forward_bytes), bytes_text(crossing.backward_bytes)
            rows.append((stages, total, "", "", *sizes))
    if rows:
        yield TextTable(("stages", "value", "made by", "tensor", "forward", "backward"), tuple(rows), names=4)
    if partition.num_stages == 1:
        return
    repeated = [part for part in condensed.parts if part.from_inputs and len(condensed.stages_of(part)) > 1]
    if rows := [_run_again(condensed, part) for part in repeated]:
        yield TextTable(("run again, not sent", "class", "stages", "bytes not sent"), tuple(rows), names=3)
    # The stages whose nodes use each parameter, a tied one under its first name.
    holders: dict[str, set[int]] = {}
    for node in graph.nodes:
        for name in node.parameters:
            holders.setdefault(graph.tensor_of(name), set()).add(partition.stage_of(node.name))
    sizes_of = {value.name: value.spec.bytes for value in graph.parameters}
    shared = {name: ", ".join(map(str, sorted(stages))) for name, stages in holders.items() if len(stages) > 1}
    if rows := [(short_name(name), stages, bytes_text(sizes_of[name])) for name, stages in shared.items()]:
        yield TextTable(("held by several stages", "stages", "bytes"), tuple(rows), names=2)


def _run_again(condensed: CondensedGraph, part: NodeGroup) -> Row:
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
