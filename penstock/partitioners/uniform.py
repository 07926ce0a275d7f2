"""uniform: the same number of weighty nodes in every stage, in the order of the model.

Choose it when blocks are alike, or as a first try before anything is measured.
"""

from penstock.errors import PartitionError
from penstock.ir.figures import whole
from penstock.ir.graph import Graph, Node
from penstock.ir.partition import Partition
from penstock.partitioners.contiguous import cut_at, cut_places


def uniform(graph: Graph, num_stages: int) -> Partition:
    """Cut into stages of about equal numbers of nodes with parameters (of all nodes, if too few have any)."""
    count = whole(num_stages)
    if count is None or count < 1:
        raise PartitionError("the number of stages must be a whole number, 1 or more", stages=repr(num_stages))
    if num_stages == 1:
        return cut_at(graph, [])
    weighty = _weighty(graph, num_stages)
    allowed = cut_places(graph)
    cuts: list[int] = []
    for number in range(1, num_stages):
        wish = weighty[round(number * len(weighty) / num_stages)]
        free = [place for place in allowed if not cuts or place > cuts[-1]]
        # Leave room for the cuts that are still to come.
        free = free[: len(free) - (num_stages - 1 - number)]
        if not free:
            closed = len(graph.nodes) - 1 - len(allowed)
            raise PartitionError(
                "the graph has fewer places to cut than asked for",
                places=len(allowed),
                stages=num_stages,
                hint="memory or a buffer that is written keeps nodes together: fewer stages" if closed else "",
            )
        cuts.append(min(free, key=lambda place: abs(place - wish)))
    return cut_at(graph, cuts)


def _weighty(graph: Graph, num_stages: int) -> list[int]:
    def places(chosen: list[tuple[int, Node]]) -> list[int]:
        return [place for place, _ in chosen]

    nodes = [(place, node) for place, node in enumerate(graph.nodes) if not node.from_inputs]
    with_parameters = places([(place, node) for place, node in nodes if node.parameters])
    return with_parameters if len(with_parameters) >= 2 * num_stages else places(nodes) or list(range(len(graph.nodes)))
