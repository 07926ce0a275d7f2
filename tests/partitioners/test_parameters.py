"""parameters: even in bytes of parameters, whatever they cost to compute."""

from penstock.ir import Cluster, Graph, Node, NodeCost, Placement, Profile, TensorSpec, Value
from penstock.partitioners import Problem, divide


def weights(sizes, costs=None, tied=()):
    """A chain of nodes with a parameter each, of so many bytes."""
    nodes = tuple(
        Node(str(at), (f"v{at - 1}",) if at else ("x",), (Value(f"v{at}", TensorSpec((1,), "uint8")),), (f"w{at}",))
        for at in range(len(sizes))
    )
    parameters = tuple(Value(f"w{at}", TensorSpec((size,), "uint8")) for at, size in enumerate(sizes))
    graph = Graph(nodes, (Value("x", TensorSpec((1,))),), (), parameters, tied=tied)
    profile = tuple(NodeCost(str(at), float(cost), 0.0, 0.0, 0.0) for at, cost in enumerate(costs or [1] * len(sizes)))
    return graph, Profile(profile, 1.0, graph.fingerprint, "made up")


def test_bytes_of_parameters_are_even():
    division = divide("parameters", Problem(*weights([8, 1, 1, 1, 1, 4]), Cluster(2)))
    assert division.partition.stages == (("0",), ("1", "2", "3", "4", "5"))
    assert "8 bytes at most on one rank" in division.why


def test_they_are_even_in_sum_where_ranks_hold_several_stages():
    division = divide("parameters", Problem(*weights([5, 4, 3, 2, 2, 3, 4, 5]), Cluster(2), Placement.vee(2)))
    assert "14 bytes at most on one rank" in division.why


def test_seconds_decide_where_parameters_do_not():
    division = divide("parameters", Problem(*weights([9, 0, 0, 0, 9], [1, 3, 3, 3, 2]), Cluster(2)))
    assert division.load_seconds == (7.0, 5.0)


def test_a_tied_parameter_counts_once_for_a_stage():
    division = divide("parameters", Problem(*weights([6, 6, 6, 6], tied=(("w0", "w1", "w2"),)), Cluster(2)))
    assert division.partition.stages == (("0", "1", "2"), ("3",))
