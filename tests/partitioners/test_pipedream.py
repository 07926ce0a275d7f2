"""pipedream: what crosses a cut counts, all of it."""

from benchmarks.graphs import chain
from penstock.ir import Cluster, Graph, Link, Node, NodeCost, Placement, Profile, TensorSpec, Value
from penstock.partitioners import Problem, divide


def test_a_cut_is_made_where_little_crosses_if_links_are_slow():
    graph, profile = chain([4, 4, 4, 4], [40, 90, 10, 1])
    slow, fast = Cluster(2, bandwidth=5.0), Cluster(2, bandwidth=500.0)
    assert divide("pipedream", Problem(graph, profile, slow)).partition.stages == (("0", "1", "2"), ("3",))
    assert divide("pipedream", Problem(graph, profile, fast)).load_seconds == (8.0, 8.0)


def test_the_link_between_two_ranks_has_its_own_bandwidth():
    graph, profile = chain([4, 4, 4, 4], [40, 90, 10, 1])
    links = Cluster(2, bandwidth=500.0, links=(Link(0, 1, bandwidth=5.0),))
    assert divide("pipedream", Problem(graph, profile, links)).bottleneck_seconds == 12.0


def skipping():
    """Every node's value goes to the next; that of the first to the last as well, and it is large."""
    sizes = {"a": 50, "b": 5, "c": 5, "d": 5}
    reads = {"a": ("x",), "b": ("a",), "c": ("b",), "d": ("c", "a")}
    nodes = tuple(Node(name, reads[name], (Value(name, TensorSpec((sizes[name],), "uint8")),)) for name in reads)
    graph = Graph(nodes, (Value("x", TensorSpec((1,))),), ("d",))
    costs = tuple(NodeCost(name, 4.0, 0.0, 0.0, 0.0) for name in reads)
    return graph, Profile(costs, 16.0, graph.fingerprint, "made up")


def test_values_that_skip_nodes_cross_the_cut_too():
    division = divide("pipedream", Problem(*skipping(), Cluster(2, bandwidth=5.0)))
    # In the middle the value of b crosses, 5 bytes, and that of a, 50 bytes.
    assert division.partition.stages == (("a", "b"), ("c", "d"))
    assert division.load_seconds == (8.0, 11.0)


def test_gradients_return_the_same_way():
    graph, profile = chain([4, 4], [20, 1])
    division = divide("pipedream", Problem(graph, profile, Cluster(2, bandwidth=2.0)))
    assert division.load_seconds == (4.0, 10.0)
    waiting = divide("pipedream", Problem(graph, profile, Cluster(2, bandwidth=2.0, latency=0.5), overlaps=False))
    assert waiting.load_seconds == (14.5, 14.5)


def test_messages_of_all_stages_of_a_rank_add_up():
    graph, profile = chain([1, 1, 1, 1], [6, 4, 6, 1])
    division = divide("pipedream", Problem(graph, profile, Cluster(2, bandwidth=2.0), Placement.loop(2, 2)))
    assert division.load_seconds == (2.0, 6.0)


def test_thousands_of_nodes_are_no_worse_than_linear():
    graph, profile = chain([1, 2, 3] * 500, [900, 3, 70] * 500)
    problem = Problem(graph, profile, Cluster(8, bandwidth=1.0))
    assert divide("pipedream", problem).bottleneck_seconds == 375
    assert divide("linear", problem).bottleneck_seconds >= 375
