"""Graphs that the tests of the views look at."""

from itertools import pairwise

from penstock.ir import Graph, Node, Partition, TensorSpec, Value

HIDDEN = TensorSpec((2, 8, 4), requires_grad=True)
"""256 bytes"""
WEIGHT = TensorSpec((4, 4), requires_grad=True)
"""16 parameters, 64 bytes"""
IDS = TensorSpec((2, 8), "int64")
MASK = TensorSpec((8, 8), "bool")
LOSS = TensorSpec((), requires_grad=True)


def block(name: str, *reads: str, makes: TensorSpec = HIDDEN, kind: str = "Block") -> Node:
    """A module with a weight."""
    return Node(name, reads, (Value(name, makes),), (f"{name}.weight",), module=name, kind=kind)


def function(name: str, *reads: str, makes: TensorSpec = HIDDEN, free: bool = False) -> Node:
    """A function in the forward of the module before the slash."""
    module, _, kind = name.rpartition("/")
    return Node(name, reads, (Value(name, makes),), from_inputs=free, module=module, kind=kind.partition("@")[0])


def graph(*nodes: Node, inputs: tuple[Value, ...], outputs: tuple[str, ...], tied: tuple[str, ...] = ()) -> Graph:
    """A graph whose parameters are those that its nodes name."""
    names = dict.fromkeys(name for node in nodes for name in node.parameters)
    return Graph(nodes, inputs, outputs, tuple(Value(name, WEIGHT) for name in names), tied=(tied,) if tied else ())


def decoder(layers: int) -> Graph:
    """An embedding, so many like layers that all read one mask, a head tied to the embedding, and a loss."""
    chain = ["embed", *(f"layers.{layer}" for layer in range(layers))]
    return graph(
        block("embed", "ids", kind="Embedding"),
        function("/arange", makes=IDS, free=True),
        function("/le", "/arange", makes=MASK, free=True),
        *(block(name, before, "/le", kind="Layer") for before, name in pairwise(chain)),
        block("head", chain[-1], kind="Linear"),
        function("/view", "head"),
        function("/view@2", "labels", makes=IDS, free=True),
        function("/loss", "/view", "/view@2", makes=LOSS),
        inputs=(Value("ids", IDS), Value("labels", IDS)),
        outputs=("/loss",),
        tied=("embed.weight", "head.weight"),
    )


def unet() -> Graph:
    """Three blocks down, three up; each hands what it makes to its opposite as well."""
    return graph(
        *(block(f"down.{level}", f"down.{level - 1}" if level else "image") for level in range(3)),
        function("/cat", "down.2", "down.2"),
        block("up.0", "/cat"),
        function("/cat@2", "up.0", "down.1"),
        block("up.1", "/cat@2"),
        function("/cat@3", "up.1", "down.0"),
        block("up.2", "/cat@3"),
        inputs=(Value("image", TensorSpec((2, 8, 4))),),
        outputs=("up.2",),
    )


def hostile() -> Graph:
    """Names that would change a document or a terminal if they were not taken as data."""
    name = '<script>alert("1")</script>\x1b[31m\x00[bold]|\u202e'
    return graph(block(name, "x&y", kind="<b>\x07"), inputs=(Value("x&y", IDS),), outputs=(name,))


def cut(whole: Graph, *before: str) -> tuple[Graph, Partition]:
    """The graph with a new stage beginning at each of the nodes."""
    stages: list[list[str]] = [[]]
    for node in whole.nodes:
        if node.name in before:
            stages.append([])
        stages[-1].append(node.name)
    return whole, Partition(tuple(map(tuple, stages)))
