"""What is seen of a model, by which names."""

import pytest
import torch

import penstock
from penstock.errors import CaptureError
from tests.capture.models import Block, Boxing, Counting, Deciding, Leaking, Masking, Skipping, Stack

BATCH = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def names(captured):
    return [node.name for node in captured.graph.nodes]


def test_blocks_stay_whole_and_what_happens_between_them_is_named_by_scope():
    assert names(penstock.capture(Stack(), (BATCH,))) == [
        "embed", "/mul", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "norm", "drop", "head",
    ]  # fmt: skip


def test_depth_opens_modules_down_to_functions():
    assert names(penstock.capture(Stack(blocks=1), (BATCH,), depth=9))[:5] == [
        "embed/linear", "/mul", "blocks.0.linear/linear", "blocks.0/tanh", "blocks.0/add",
    ]  # fmt: skip


def test_depth_zero_is_refused():
    with pytest.raises(CaptureError, match="depth must be 1 or more"):
        penstock.capture(Stack(), (BATCH,), depth=0)


@pytest.mark.parametrize("block", ["blocks.1", Block, "Block"])
def test_basic_blocks_stay_whole_by_name_or_class(block):
    assert "blocks.1" in names(penstock.capture(Stack(), (BATCH,), depth=9, basic_blocks=(block,)))


def test_an_unknown_basic_block_is_refused():
    with pytest.raises(CaptureError, match=r"no module of this name or class \(basic block: blokcs"):
        penstock.capture(Stack(), (BATCH,), basic_blocks=("blokcs",))


def test_parameters_and_values_are_listed_with_their_specs():
    graph = penstock.capture(Stack(), (BATCH,)).graph
    assert graph["blocks.2"].parameters == ("blocks.2.linear.weight", "blocks.2.linear.bias")
    assert str(graph.spec("blocks.2")) == "float32[6, 8]"
    assert graph.spec("blocks.2").requires_grad


def test_tied_parameters_are_grouped():
    model = Stack()
    model.blocks[3].linear.weight = model.blocks[0].linear.weight
    assert penstock.capture(model, (BATCH,)).graph.tied == (("blocks.0.linear.weight", "blocks.3.linear.weight"),)


def test_a_leaf_that_lets_a_tensor_out_is_opened():
    assert "blocks.1.linear" in names(penstock.capture(Leaking(), (torch.randn(2, 8),)))


def test_python_state_between_blocks_is_refused():
    with pytest.raises(CaptureError, match="runs differently each time"):
        penstock.capture(Counting(), (BATCH,))


def test_randomness_between_blocks_is_refused():
    with pytest.raises(CaptureError, match="runs differently each time"):
        penstock.capture(Skipping(blocks=16), (BATCH,))


def test_an_object_that_stays_within_opened_code_does_not_matter():
    assert names(penstock.capture(Boxing(), (BATCH,))) == ["embed", "blocks.0", "head"]


def test_a_batch_that_the_model_cannot_take_is_refused():
    with pytest.raises(CaptureError, match="cannot be called with this batch"):
        penstock.capture(Stack(), (BATCH, 1.0, 2.0))


def test_a_decision_on_activations_is_a_guard_and_names_the_module():
    captured = penstock.capture(Deciding(), (BATCH,))
    recording = captured.recording((BATCH,), {})
    replay = captured.replay(recording, names(captured), captured.model, captured.graph.outputs)
    with pytest.raises(CaptureError, match=r"data-dependent control flow.*read by: bool, recorded: False, found: True"):
        replay.run({"x": BATCH * 1e6})


def test_a_decision_on_inputs_is_recorded_anew():
    model, ones = Masking(), torch.ones(6)
    captured = penstock.capture(model, (BATCH, ones))
    captured.recording((BATCH, torch.tensor([1.0, 1, 1, 0, 1, 1])), {})
    captured.recording((BATCH, ones), {})
    assert captured.num_recordings == 2


def test_other_shapes_are_recorded_once_each():
    captured = penstock.capture(Stack(), (BATCH,))
    for size in (2, 3, 2, 6):
        captured.recording((BATCH[:size],), {})
    assert captured.num_recordings == 3


def test_training_and_evaluation_are_recorded_apart():
    model = Stack()
    captured = penstock.capture(model, (BATCH,))
    model.eval()
    captured.recording((BATCH,), {})
    assert captured.num_recordings == 2
