"""outline: a graph as a table of text: what each part is, reads and makes, its parameters, and its stage.

Choose it to look at a model where you are, in a terminal or a log. By default functions between modules are gathered
and runs of like parts are one line; `alike=0` lists every node. On a terminal, what depends on inputs only is dim, and
stages stand apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group
from rich.text import Text

from penstock.ir import Graph, Value, count_text, counted
from penstock.views.base import RichView, Staged
from penstock.views.flow import Flow, sizes_text
from penstock.views.parts import check_alike, shown
from penstock.views.sheet import Sheet

MOST_READS = 2
"""names of values that a line of the condensed table holds"""


@dataclass(frozen=True)
class Outline(RichView[Staged]):
    """A Markdown table under a line about the whole, its inputs and its outputs."""

    alike: int = 4
    """how many like parts in a row are one line; 0: every node by itself"""
    name = "outline"
    noun = Graph
    suffix = ".txt"

    def __post_init__(self) -> None:
        check_alike(self.alike)

    def __call__(self, subject: Staged) -> str:
        flow = Flow.of(subject, self.alike)
        return "\n".join([*_heading(flow), "", self._sheet(flow).markdown()])

    def renderable(self, subject: Staged) -> Group:
        flow = Flow.of(subject, self.alike)
        table = self._sheet(flow).rich()
        for row, part, following in zip(table.rows, flow.parts, (*flow.parts[1:], None), strict=True):
            row.style = "dim" if part.is_free else ""
            row.end_section = following is not None and following.stage > part.stage and not following.is_free
        return Group(*map(Text, _heading(flow)), table)

    def _sheet(self, flow: Flow) -> Sheet:
        has_stages = flow.partition.num_stages > 1
        header = ("node", "class", "reads", "makes", "parameters", *(("stage",) if has_stages else ()))
        rows = []
        for place, part in enumerate(flow.parts):
            weight = flow.weight(part.nodes)
            parameters = count_text(weight.num_parameters) if weight.num_parameters else ""
            texts = (part.title, part.kind, self._reads(flow, place), _makes(flow, place), parameters)
            rows.append((*texts, *((_stages(flow, place),) if has_stages else ())))
        return Sheet(header, tuple(rows), names=4)

    def _reads(self, flow: Flow, place: int) -> str:
        """The values by name; condensed, those from inputs only are counted."""
        part, graph = flow.parts[place], flow.graph
        read = dict.fromkeys(value for node in part.nodes for value in node.reads)
        names = [name for name in read if name not in graph.makers]
        made = [name for name in read if name in graph.makers and flow.place[graph.makers[name].name] != place]
        if not self.alike:
            return ", ".join(map(shown, (*names, *made)))
        free = [name for name in made if graph.makers[name].from_inputs]
        names += [name for name in made if name not in set(free)]
        shorter = [*map(shown, names[:MOST_READS]), *([f"{len(names) - MOST_READS} more"] * (len(names) > MOST_READS))]
        return ", ".join([*shorter, *([f"{len(free)} from inputs"] if free else [])])


def _makes(flow: Flow, place: int) -> str:
    values = [value for wire in flow.wires if wire.source == place for value in wire.values]
    return sizes_text(values) if values else ""


def _stages(flow: Flow, place: int) -> str:
    stages = flow.stages_of(flow.parts[place])
    return "all" if len(stages) == flow.partition.num_stages else ", ".join(map(str, stages))


def _heading(flow: Flow) -> list[str]:
    graph, stages = flow.graph, flow.partition.num_stages
    cut = f", {stages} stages" if stages > 1 else ""
    whole = f"{counted(len(graph.nodes), 'node')}, {flow.weight(graph.nodes)}{cut}"
    outputs = [Value(name, graph.spec(name)) for name in graph.outputs]
    return [whole, f"inputs: {_listed(graph.inputs)}", f"outputs: {_listed(outputs)}"]


def _listed(values: Sequence[Value]) -> str:
    texts = [f"{shown(value.name)} {value.spec}" for value in values[:8]]
    return ", ".join([*texts, *([f"{len(values) - 8} more"] if len(values) > 8 else [])]) or "none"
