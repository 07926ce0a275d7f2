"""What careless users give is refused in words that help."""

import dataclasses

import pytest
import torch

import penstock
from penstock.capture import Captured
from penstock.errors import CaptureError, PartitionError
from penstock.partitioners import uniform
from penstock.stages import StageSequence
from tests.capture.models import Block, Stack
from tests.parity import assert_stages_train_like_the_model

BATCH = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))

BATCHES = {
    "another type": (BATCH.double(), r"module: embed, error: RuntimeError: mat1 and mat2 must have the same dtype"),
    "another shape": (torch.ones(6, 5), r"module: embed, error: RuntimeError: mat1 and mat2 shapes cannot be mult"),
    "a number": (3, r"module: embed, error: TypeError"),
    "too few samples": (BATCH[:1], r"module: norm, error: ValueError: Expected more than 1 value per channel"),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_a_batch_that_torch_refuses_names_the_module_and_the_reason(kind):
    batch, problem = BATCHES[kind]
    with pytest.raises(CaptureError, match=rf"cannot be run on this batch \({problem}.*\ntry: call the model") as found:
        penstock.capture(Stack(), (batch,))
    assert isinstance(found.value.__cause__, Exception)


def test_a_bad_batch_after_a_good_one_is_refused_alike_and_the_next_one_runs():
    model = Stack().eval()
    captured = penstock.capture(model, (BATCH,))
    run = StageSequence(captured, uniform(captured.graph, 3))
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
    problem = rf"a tuple of the model's positional arguments \(got: {type(args).__name__}\)\ntry:"
    with pytest.raises(CaptureError, match=problem):
        penstock.capture(Stack(), args)


def test_named_arguments_that_are_no_dict_are_refused():
    with pytest.raises(CaptureError, match=r"a dict of the model's keyword arguments \(got: list\)"):
        penstock.capture(Stack(), (BATCH,), [1.0])


def test_a_model_that_calls_nothing_is_refused():
    with pytest.raises(CaptureError, match=r"got one that calls none \(model: Sequential\)\ntry: a model with layers"):
        penstock.capture(torch.nn.Sequential(), (BATCH,))


def test_a_model_must_be_a_module():
    with pytest.raises(CaptureError, match=r"model must be a torch.nn.Module \(got: function\)"):
        penstock.capture(lambda x: x, (BATCH,))


def test_a_model_in_which_nothing_needs_a_gradient_is_split_and_run():
    model = Stack().requires_grad_(False).eval()
    captured = penstock.capture(model, (BATCH,))
    penstock.split(captured, uniform(captured.graph, 3))
    run = StageSequence(captured, uniform(captured.graph, 3))
    assert torch.equal(run(BATCH), model(BATCH))
    run.backward({0: torch.ones(6, 3)})
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_partition_of_another_model_is_refused():
    captured, other = penstock.capture(Stack(4), (BATCH,)), penstock.capture(Stack(6), (BATCH,))
    with pytest.raises(PartitionError, match=r"no such node \(node: 'blocks.4', stage: 1\)"):
        penstock.split(captured, uniform(other.graph, 2))
    with pytest.raises(PartitionError, match=r"every node must be in a stage \(nodes: 2, first: 'blocks.4'\)"):
        penstock.split(other, uniform(captured.graph, 2))


GRANULARITIES = {
    "a depth that is a text": ({"depth": "2"}, r"depth must be 1 or more.*depth: '2'"),
    "a class": ({"basic_blocks": Block}, r"a list of module names and classes \(got: Block\)"),
    "a text": ({"basic_blocks": "blocks.1"}, r"a list of module names and classes \(got: 'blocks.1'\)"),
    "a list in a list": (
        {"basic_blocks": [["blocks.1"]]},
        r"name of a module or a class \(basic block: \['blocks.1'\]",
    ),
}


@pytest.mark.parametrize("kind", GRANULARITIES)
def test_an_invalid_depth_or_block_is_refused(kind):
    options, problem = GRANULARITIES[kind]
    with pytest.raises(CaptureError, match=problem):
        penstock.capture(Stack(), (BATCH,), **options)


def test_parameters_that_have_no_shape_yet_are_refused():
    model = Stack()
    model.embed = torch.nn.LazyLinear(8)
    with pytest.raises(CaptureError, match=r"no shape before the first forward \(name: embed.weight\)\ntry: call"):
        penstock.capture(model, (BATCH,))
    assert type(model.embed) is torch.nn.LazyLinear


def test_a_model_that_is_compiled_as_a_whole_is_refused():
    with pytest.raises(CaptureError, match=r"compiled as a whole .*\ntry: .*model._orig_mod"):
        penstock.capture(torch.compile(Stack(), backend="eager"), (BATCH,))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_model_that_is_scripted_as_a_whole_is_refused():
    with pytest.raises(CaptureError, match=r"scripted as a whole .*\ntry: capture the model before torch.jit.script"):
        penstock.capture(torch.jit.script(torch.nn.Linear(4, 4)), (BATCH,))


def test_recording_in_inference_mode_is_refused():
    with torch.inference_mode(), pytest.raises(CaptureError, match=r"in inference mode\ntry: torch.no_grad"):
        penstock.capture(Stack(), (BATCH,))


class Overwriting(Stack):
    """Writes into its first input and reads its second."""

    def forward(self, x, y):
        x.add_(1)
        return self.head(self.blocks[0](self.embed(x) + self.embed(y)))


def test_inputs_that_share_memory_are_refused_if_one_is_written():
    both = torch.randn(6, 5)
    captured = penstock.capture(Overwriting(), (BATCH, BATCH.clone()))
    for one, other in ((BATCH, BATCH), (both[:, :4], both[:, 1:])):
        with pytest.raises(CaptureError, match=r"two inputs share memory.*inputs: x, y, written: x\)\ntry: .*clone"):
            captured.recording((one, other), {})


class Reading(Stack):
    """Reads both its inputs."""

    def forward(self, x, y):
        return self.head(self.embed(x) + self.embed(y))


def test_inputs_that_lie_side_by_side_or_are_only_read_may_share_memory():
    both = torch.randn(12, 4)
    for model, batch in ((Overwriting(), (both[:6], both[6:])), (Reading(), (BATCH, BATCH))):
        captured = penstock.capture(model, batch)
        assert_stages_train_like_the_model(captured, uniform(captured.graph, 2))


@pytest.mark.parametrize("name", ["Linear", "forward", "training", "embed.weight", "__class__"])
def test_a_graph_that_names_no_module_of_the_model_is_refused_before_anything_is_looked_up(name):
    graph = penstock.capture(Stack(), (BATCH,)).graph
    node, *rest = graph.nodes
    forged = dataclasses.replace(graph, nodes=(dataclasses.replace(node, module=name), *rest))
    with pytest.raises(CaptureError, match="names a module that the model does not have"):
        Captured.planned(Stack(), forged)


def test_a_model_that_is_wrapped_for_data_parallelism_is_refused():
    with pytest.raises(CaptureError, match=r"wrapped for data parallelism.*got: DataParallel\)\ntry: model.module"):
        penstock.capture(torch.nn.DataParallel(Stack()), (BATCH,))
