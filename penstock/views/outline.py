"""A graph as a table of text: the class, reads, results, parameters and stage of each part.

Choose it to read a model in a terminal or a log. By default functions between modules are grouped and runs of equal
parts are one line; `collapse=0` lists every node. On a terminal, parts that depend on inputs only are dim, and stages
are separated.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Group
from rich.text import Text

from penstock.ir import Graph, Value, count_text, counted
from penstock.views.base import Staged, short_name
from penstock.views.condense import CondensedGraph, check_collapse, values_text
from penstock.views.table import TableView, TextTable

MAX_READS = 2
"""names of values in a line of the condensed table"""
MAX_VALUES = 8
"""inputs and outputs in the heading"""


@dataclass(frozen=True)
class Outline(TableView[Staged]):
    """A Markdown table under lines about the whole model, its inputs and its outputs."""

    collapse: int = 4
    """number of equal parts in a row from which they are one line; 0 lists every node"""
    name = "outline"
    record = Graph

    def __post_init__(self) -> None:
        check_collapse(self.collapse)

    def renderable(self, subject: Staged) -> Group:
        lines, (table,) = self.content(subject)
        drawn, parts = table.rich(), CondensedGraph.of(subject, self.collapse).parts
        for row, part, following in zip(drawn.rows, parts, (*parts[1:], None), strict=True):
            row.style = "dim" if part.from_inputs else ""
            row.end_section = following is not None and following.stage > part.stage and not following.from_inputs
        return Group(*map(Text, lines), drawn)

    def content(self, subject: Staged) -> tuple[Sequence[str], Iterable[TextTable]]:
        """Lines about the model, and a table with a row per part; stages have a column if there are several."""
        condensed = CondensedGraph.of(subject, self.collapse)
        num_stages = condensed.partition.num_stages
        header = ("node", "class", "reads", "makes", "parameters", *(("stage",) if num_stages > 1 else ()))
        rows = []
        for place, part in enumerate(condensed.parts):
            made = [value for wire in condensed.connections if wire.source == place for value in wire.values]
            count = condensed.parameter_size(part.nodes).num_parameters
            row = [part.title, part.kind, self._reads(condensed, place), values_text(made) if made else ""]
            row.append(count_text(count) if count else "")
            if num_stages > 1:
                stages = condensed.stages_of(part)
                row.append("all" if len(stages) == num_stages else ", ".join(map(str, stages)))
            rows.append(tuple(row))
        return _heading(condensed), [TextTable(header, tuple(rows), names=4)]

    def _reads(self, condensed: CondensedGraph, place: int) -> str:
        """The values by name; in a condensed table those computed from inputs are counted only."""
        makers = condensed.graph.makers
        read = dict.fromkeys(value for node in condensed.parts[place].nodes for value in node.reads)
        names = [name for name in read if name not in makers]
        made = [name for name in read if name in makers and condensed.part_of[makers[name].name] != place]
        if not self.collapse:
            return ", ".join(map(short_name, (*names, *made)))
        names += [name for name in made if not makers[name].from_inputs]
        texts = [short_name(name) for name in names[:MAX_READS]]
        if len(names) > MAX_READS:
            texts.append(f"{len(names) - MAX_READS} more")
        if from_inputs := sum(makers[name].from_inputs for name in made):
            texts.append(f"{from_inputs} from inputs")
        return ", ".join(texts)


def _heading(condensed: CondensedGraph) -> list[str]:
    graph, stages = condensed.graph, condensed.partition.num_stages
    cut = f", {stages} stages" if stages > 1 else ""
    whole = f"{counted(len(graph.nodes), 'node')}, {condensed.parameter_size(graph.nodes)}{cut}"
    outputs = [Value(name, graph.spec(name)) for name in graph.outputs]
    return [whole, f"inputs: {_listed(graph.inputs)}", f"outputs: {_listed(outputs)}"]


def _listed(values: Sequence[Value]) -> str:
    texts = [f"{short_name(value.name)} {value.spec}" for value in values[:MAX_VALUES]]
    if len(values) > MAX_VALUES:
        texts.append(f"{len(values) - MAX_VALUES} more")
    return ", ".join(texts) or "none"
