"""Parts: the nodes of a graph gathered into what a reader tells apart: blocks, glue between them, runs of like ones."""

import math
from collections.abc import Iterable, Mapping
from itertools import accumulate, groupby
from typing import NamedTuple

from penstock.errors import ViewError
from penstock.ir import Graph, Node, Partition, TensorSpec, bytes_text, count_text
from penstock.views.base import MAX_NAME, printable

DOTS = " … "


class Weight(NamedTuple):
    """The distinct parameters of some nodes."""

    num_parameters: int
    bytes: int

    def __str__(self) -> str:
        word = "parameter" if self.num_parameters == 1 else "parameters"
        return f"{count_text(self.num_parameters)} {word}, {bytes_text(self.bytes)}"


class Part(NamedTuple):
    """Nodes that are shown as one: a block, glue, or several repetitions of those."""

    nodes: tuple[Node, ...]
    stage: int
    times: int = 1
    """how many repetitions stand one after the other"""

    @property
    def is_free(self) -> bool:
        """Whether it depends on inputs only, so that every stage that reads it runs it."""
        return all(node.from_inputs for node in self.nodes)

    @property
    def is_glue(self) -> bool:
        """Whether it is functions between blocks."""
        return self.times == 1 and not any(map(is_block, self.nodes))

    @property
    def first(self) -> tuple[Node, ...]:
        """The nodes of the first repetition."""
        return self.nodes[: len(self.nodes) // self.times]

    @property
    def last(self) -> tuple[Node, ...]:
        """The nodes of the last repetition."""
        return self.nodes[-(len(self.nodes) // self.times) :]

    @property
    def title(self) -> str:
        """The name, or the first and the last of several."""
        if self.times > 1:
            return f"{_label(self.first)}{DOTS}{_label(self.last)}"
        first, last = self.nodes[0], self.nodes[-1]
        if len(self.nodes) == 1:
            return shown(first.name)
        return f"{shown(first.name)}{DOTS}{shown(last.name.removeprefix(f'{last.module}/'))}"

    @property
    def kind(self) -> str:
        """The class of a block, the number of functions of glue, and how often."""
        if self.times > 1:
            kind = _kind(self.first[0]) if len(self.first) == 1 else f"{len(self.first)} nodes"
            return f"{self.times} × {kind}"
        if is_block(self.nodes[0]):
            return _kind(self.nodes[0])
        return f"glue: {len(self.nodes)} functions" if len(self.nodes) > 1 else f"glue: {_kind(self.nodes[0])}"


def check_alike(alike: int) -> None:
    """Refuse a number of like parts that cannot be."""
    if alike < 0 or alike == 1:
        raise ViewError("like parts are two or more", alike=alike, hint="alike=0 for every node by itself")


def is_block(node: Node) -> bool:
    """Whether the node is a module that is kept whole, or a function with parameters of its own."""
    return bool(node.parameters) or not node.name.startswith(f"{node.module}/")


def shown(name: str) -> str:
    """A name as it is printed; of a very long one the end, which tells more."""
    clean = printable(name)
    return clean if len(clean) <= MAX_NAME else f"...{clean[3 - MAX_NAME :]}"


def gathered(graph: Graph, partition: Partition) -> tuple[list[Part], list[Part]]:
    """The parts by stage and in the order of the graph: first those that depend on inputs only, then the others."""
    free = [Part((node,), partition.stage_of(node.name)) for node in graph.nodes if node.from_inputs]
    others = [Part((node,), partition.stage_of(node.name)) for node in graph.nodes if not node.from_inputs]
    others.sort(key=lambda part: part.stage)
    return free, others


def glued(parts: Iterable[Part], graph: Graph) -> list[Part]:
    """The parts with the functions of one module made one as far as no block stands between them."""
    blocks = list(accumulate(not node.from_inputs and is_block(node) for node in graph.nodes))
    blocks_before = {node.name: count for node, count in zip(graph.nodes, blocks, strict=True)}

    def key(part: Part) -> tuple[int, int, str, str]:
        node = part.nodes[0]
        stage = -1 if node.from_inputs else part.stage
        return stage, blocks_before[node.name], node.module, node.name if is_block(node) else ""

    merged = []
    for _, group in groupby(parts, key=key):
        found = list(group)
        merged.append(Part(tuple(node for part in found for node in part.nodes), found[0].stage))
    return merged


def weight(nodes: Iterable[Node], graph: Graph, specs: Mapping[str, TensorSpec]) -> Weight:
    """The parameters of the nodes, a tied one once; `specs` are those of the graph's parameters."""
    names = {graph.tensor_of(name) for node in nodes for name in node.parameters}
    return Weight(sum(math.prod(specs[name].shape) for name in names), sum(specs[name].bytes for name in names))


def _label(nodes: tuple[Node, ...]) -> str:
    """What all the nodes are part of, or else the first block among them."""
    if len(nodes) == 1:
        return shown(nodes[0].name)
    paths = [node.module.split(".") for node in nodes]
    common = []
    for words in zip(*paths, strict=False):
        if len(set(words)) > 1:
            break
        common.append(words[0])
    block = next((node for node in nodes if is_block(node)), nodes[0])
    return shown(".".join(common) if any(word.isdigit() for word in common) else block.name)


def _kind(node: Node) -> str:
    return shown(node.kind) or "node"
