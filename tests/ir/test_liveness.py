"""Only values from which the loss can be reached need a gradient."""

import pytest

from penstock.ir import ADDED_LOSS, Graph, Node, TensorSpec, Value, prune_gradients
from penstock.runtime.adding import added_loss

NEEDS, IS_FREE = TensorSpec((2, 3), requires_grad=True), TensorSpec((2, 3))


def node(name: str, *reads: str, spec: TensorSpec = NEEDS) -> Node:
    return Node(name, reads, (Value(name, spec),))


#   x -> stem -> trunk -> loss
#          |---> side -> view      (mask is read by trunk, and needs no gradient)
GRAPH = Graph(
    (
        node("stem", "x"), node("mask", "x", spec=IS_FREE), node("trunk", "stem", "mask"), node("side", "stem"),
        node("view", "side"), node("loss", "trunk"),
    ),
    (Value("x", IS_FREE),),
    ("loss", "view"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("roots", "adding", "expected"),
    [
        (("loss",), (), {"stem", "trunk", "loss"}),
        (("loss", "view"), (), {"stem", "trunk", "loss", "side", "view"}),
        (("loss",), ("view",), {"stem", "trunk", "loss", "side"}),
        ((), ("side",), {"stem"}),
        ((), (), set()),
    ],
)
def test_gradients_return_on_the_ways_to_a_root_or_to_what_adds_to_the_loss(roots, adding, expected) -> None:
    found = prune_gradients(GRAPH, roots, adding)
    assert {value.name for one in found.nodes for value in one.makes if value.spec.requires_grad} == expected


def test_the_function_that_adds_goes_by_its_name() -> None:
    assert added_loss.__name__ == ADDED_LOSS
