"""What careless users give is refused in words that help."""

import pytest
import torch

import penstock
from penstock.errors import CaptureError, PartitionError
from penstock.partitioners import uniform
from penstock.split import Sequence
from tests.capture.models import Stack

BATCH = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))

BATCHES = {
    "another type": (BATCH.double(), r"module: embed, error: RuntimeError: mat1 and mat2 must have the same dtype"),
    "another shape": (torch.ones(6, 5), r"module: embed, error: RuntimeError: mat1 and mat2 shapes cannot be mult"),
    "a number": (3, r"module: embed, error: TypeError"),
    "too few samples": (BATCH[:1], r"module: norm, error: ValueError: Expected more than 1 value per channel"),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_a_batch_that_torch_refuses_names_the_module_and_says_why(kind):
    batch, problem = BATCHES[kind]
    with pytest.raises(CaptureError, match=rf"cannot be run on this batch \({problem}.*\ntry: call the model") as found:
        penstock.capture(Stack(), (batch,))
    assert isinstance(found.value.__cause__, Exception)


def test_a_bad_batch_after_a_good_one_is_refused_alike_and_the_next_one_runs():
    model = Stack().eval()
    captured = penstock.capture(model, (BATCH,))
    run = Sequence(captured, uniform(captured.graph, 3))
    with pytest.raises(CaptureError, match=r"module: embed, error: RuntimeError"):
        run(BATCH.double())
    assert torch.equal(run(BATCH), model(BATCH))


def test_the_innermost_module_is_named():
    model = Stack()
    model.blocks[2].linear = torch.nn.Linear(9, 8)
    with pytest.raises(CaptureError, match=r"module: blocks.2.linear, error: RuntimeError: mat1 and mat2 shapes"):
        penstock.capture(model, (BATCH,))


@pytest.mark.parametrize("args", [BATCH, {"x": BATCH}, 3, None])
def test_arguments_that_are_no_tuple_are_refused(args):
    with pytest.raises(CaptureError, match=rf"of the model in a tuple \(given: {type(args).__name__}\)\ntry:"):
        penstock.capture(Stack(), args)


def test_named_arguments_that_are_no_dict_are_refused():
    with pytest.raises(CaptureError, match=r"named arguments of the model in a dict \(given: list\)"):
        penstock.capture(Stack(), (BATCH,), [1.0])


def test_what_is_no_module_is_refused():
    with pytest.raises(CaptureError, match=r"only a torch.nn.Module can be captured \(given: function\)"):
        penstock.capture(lambda x: x, (BATCH,))


def test_a_model_in_which_nothing_needs_a_gradient_is_split_and_run():
    model = Stack().requires_grad_(False).eval()
    captured = penstock.capture(model, (BATCH,))
    penstock.split(captured, uniform(captured.graph, 3))
    run = Sequence(captured, uniform(captured.graph, 3))
    assert torch.equal(run(BATCH), model(BATCH))
    run.backward({0: torch.ones(6, 3)})
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_partition_of_another_model_is_refused():
    captured, other = penstock.capture(Stack(4), (BATCH,)), penstock.capture(Stack(6), (BATCH,))
    with pytest.raises(PartitionError, match=r"no such node \(node: 'blocks.4', stage: 1\)"):
        penstock.split(captured, uniform(other.graph, 2))
    with pytest.raises(PartitionError, match=r"nodes in no stage \(nodes: 2, first: 'blocks.4'\)"):
        penstock.split(other, uniform(captured.graph, 2))
