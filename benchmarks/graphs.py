"""Graphs with costs for partitioners: published ones, read from ../shared/data if it exists, and synthetic chains."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from penstock.ir import Graph, Node, NodeBytes, NodeCost, Profile, TensorSpec, Value

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
PIPEDREAM = ("densenet121", "gnmt", "resnet50", "vgg16")
BYTES_PER_UNIT = 2.0**31
"""bandwidth that turns the edge costs of dnn-partitioning back into bytes"""

Measured = tuple[Graph, Profile]


def chain(costs: Sequence[float], sizes: Sequence[int] = ()) -> Measured:
    """A chain of nodes, named by their numbers, whose values have one byte or the given sizes."""
    sizes = sizes or [1] * len(costs)
    nodes = [
        Node(str(at), (str(at - 1) if at else "x",), (Value(str(at), _tensor(size)),)) for at, size in enumerate(sizes)
    ]
    graph = Graph(tuple(nodes), (Value("x", _tensor(1)),), (str(len(costs) - 1),))
    return graph, _profile(graph, {str(at): (float(cost), 0.0) for at, cost in enumerate(costs)}, {})


def pipedream(name: str) -> Measured:
    """A graph that the PipeDream project profiled, in seconds and bytes."""
    lines = (DATA / "pipedream" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    edges = [tuple(line.strip().split(" -- ")) for line in lines if line.startswith("\t")]
    numbers = {line.partition(" -- ")[0]: _numbers(line) for line in lines if not line.startswith("\t")}
    names = sorted(numbers, key=lambda node: int(node.removeprefix("node")))
    reads = {node: tuple(source for source, target in edges if target == node) for node in names}
    sizes = {node: (int(numbers[node]["activation_size"]), int(numbers[node]["parameter_size"])) for node in names}
    seconds = {
        node: (numbers[node]["forward_compute_time"] / 1000, numbers[node]["backward_compute_time"] / 1000)
        for node in names
    }
    graph = _graph({node: (*reads[node],) for node in names}, sizes, trains=True)
    return graph, _profile(graph, seconds, {node: sizes[node][0] for node in names})


def devices(name: str) -> tuple[Graph, Profile, int]:
    """A graph of dnn-partitioning with one node for forward and backward of a layer, and the memory of a device."""
    data = json.loads((DATA / "dnn-partitioning" / f"{name}.json").read_text(encoding="utf-8"))
    layer_of = {node["id"]: str(node["colorClass"]) for node in data["nodes"]}
    is_backward = {node["id"]: bool(node["isBackwardNode"]) for node in data["nodes"]}
    seconds = dict.fromkeys(layer_of.values(), (0.0, 0.0))
    held = dict.fromkeys(layer_of.values(), 0)
    for node in data["nodes"]:
        forward, backward = seconds[layer_of[node["id"]]]
        slow = float(node["fpgaLatency"])
        seconds[layer_of[node["id"]]] = (
            (forward, backward + slow) if node["isBackwardNode"] else (forward + slow, backward)
        )
        held[layer_of[node["id"]]] += int(node["size"])
    edges = [edge for edge in data["edges"] if not is_backward[edge["sourceId"]]]
    sent = {layer_of[edge["sourceId"]]: round(edge["cost"] * BYTES_PER_UNIT) for edge in edges}
    reads: dict[str, tuple[str, ...]] = dict.fromkeys(held, ())
    for edge in edges:
        reads[layer_of[edge["destId"]]] += (layer_of[edge["sourceId"]],)
    graph = _graph(
        {layer: reads[layer] for layer in _sorted(reads)},
        {layer: (sent.get(layer, 0), held[layer]) for layer in held},
        trains=any(is_backward.values()),
    )
    return graph, _profile(graph, seconds, {}), int(data["maxSizePerFPGA"])


def _numbers(line: str) -> dict[str, float]:
    """The numbers at the end of a line; a list is summed."""
    found = re.findall(r"(\w+)=(\[[^\]]*\]|[\d.]+)", line.rpartition(" -- ")[2])
    return {name: sum(map(float, re.findall(r"[\d.]+", number))) for name, number in found}


def _sorted(reads: dict[str, tuple[str, ...]]) -> list[str]:
    """A topological order of the layers."""
    order: dict[str, None] = {}
    while len(order) < len(reads):
        ready = [layer for layer in reads if layer not in order and all(source in order for source in reads[layer])]
        order.update(dict.fromkeys(ready))
    return list(order)


def _graph(reads: dict[str, tuple[str, ...]], sizes: dict[str, tuple[int, int]], trains: bool) -> Graph:
    """A graph of nodes with one value and one parameter each; `sizes` are those of value and parameter."""
    nodes = tuple(
        Node(name, sources or ("x",), (Value(name, _tensor(sizes[name][0], trains)),), (f"{name}.weight",))
        for name, sources in reads.items()
    )
    parameters = tuple(Value(f"{name}.weight", _tensor(sizes[name][1])) for name in reads)
    return Graph(nodes, (Value("x", _tensor(1)),), (), parameters)


def _profile(graph: Graph, seconds: dict[str, tuple[float, float]], kept: dict[str, int]) -> Profile:
    costs = tuple(
        NodeCost(node.name, *seconds[node.name], 0.0, 0.0, NodeBytes(kept=kept.get(node.name, 0)))
        for node in graph.nodes
    )
    return Profile(costs, sum(map(sum, seconds.values())), graph.fingerprint, "given")


def _tensor(size: int, requires_grad: bool = False) -> TensorSpec:
    return TensorSpec((size,), "uint8", requires_grad)
