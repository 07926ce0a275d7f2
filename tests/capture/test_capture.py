"""What is seen of a model, by which names."""

import pytest
import torch
from torch import nn

import penstock
from penstock.capture import Replay
from penstock.errors import CaptureError
from penstock.partitioners import uniform
from penstock.stages import StageSequence
from tests.capture.models import Block, Boxing, Counting, Deciding, Leaking, Masking, Stack, Wrapped
from tests.zoo import ZOO

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
    with pytest.raises(
        CaptureError, match=r"must be the name or the class of a module in the model \(basic block: blokcs"
    ):
        penstock.capture(Stack(), (BATCH,), basic_blocks=("blokcs",))


@pytest.mark.parametrize("block", ["", Stack, "Stack"])
def test_the_model_itself_is_no_basic_block(block):
    with pytest.raises(CaptureError, match="the model itself cannot be a basic block"):
        penstock.capture(Stack(), (BATCH,), basic_blocks=(block,))


def test_a_class_that_the_model_shares_with_modules_in_it_means_these():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    assert names(penstock.capture(model, (BATCH,), depth=9, basic_blocks=(nn.Sequential,))) == ["0", "1"]


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


def test_the_error_for_python_state_names_a_block_that_works():
    model = nn.Sequential(nn.Linear(4, 4), Counting(), nn.ReLU())
    with pytest.raises(CaptureError, match=r'try: basic_blocks=\["1"\]'):
        penstock.capture(model, (BATCH,), depth=9)


def test_an_object_that_stays_within_opened_code_does_not_matter():
    assert names(penstock.capture(Boxing(), (BATCH,))) == ["embed", "blocks.0", "head"]


def test_a_batch_that_the_model_cannot_take_is_refused():
    with pytest.raises(CaptureError, match="cannot be called with this batch"):
        penstock.capture(Stack(), (BATCH, 1.0, 2.0))


def test_a_decision_on_activations_is_a_guard_and_names_the_module():
    captured = penstock.capture(Deciding(), (BATCH,))
    recording = captured.recording((BATCH,), {})
    replay = Replay(recording, names(captured), captured.model, captured.graph.outputs)
    with pytest.raises(CaptureError, match=r"data-dependent control flow.*read by: bool, recorded: False, found: True"):
        replay.run({"x": BATCH * 1e6})


def test_another_decision_on_inputs_is_recorded_again():
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


def test_modules_that_are_never_called_only_hold_their_elements():
    assert names(penstock.capture(Wrapped(), (torch.randn(2, 8),))) == [
        *("lists.0.0", "lists.0.1", "lists.1.0", "lists.1.1", "bare.blocks.0", "bare.blocks.1"),
        *("iterated.0.0", "iterated.0.1", "iterated.1.0", "iterated.1.1"),
    ]


@pytest.mark.parametrize("block", ["lists", "lists.1", "bare", nn.ModuleList])
def test_a_basic_block_that_is_never_called_is_refused(block):
    with pytest.raises(CaptureError, match=r"must be a module that is called, and this one has no forward"):
        penstock.capture(Wrapped(), (torch.randn(2, 8),), basic_blocks=(block,))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("is_training", [True, False])
def test_a_larger_depth_never_gives_fewer_nodes(dropout, is_training):
    model = Wrapped(dropout).train(is_training)
    counts = [len(penstock.capture(model, (torch.randn(2, 8),), depth=depth).graph.nodes) for depth in range(1, 5)]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


def test_a_list_of_layers_is_no_level():
    model, args, kwargs = ZOO["llama"]()
    captured = [penstock.capture(model, args, kwargs, depth=depth) for depth in range(1, 6)]
    counts = [len(each.graph.nodes) for each in captured]
    assert counts == sorted(counts)
    assert "model.layers.0" in names(captured[1])


@pytest.mark.parametrize("depth", [None, 1, 9])
def test_a_module_without_calls_has_a_stage_in_either_mode(depth):
    model = Wrapped(0.5)
    captured = penstock.capture(model, (torch.randn(2, 8),), depth=depth)
    stages = StageSequence(captured, uniform(captured.graph, 3))
    model.eval()
    batch = torch.randn(3, 8)
    assert torch.equal(stages(batch), model(batch))


class Encoder(nn.Module):
    """Two layers with a decision between them."""

    def __init__(self, decide):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.decide = decide

    def forward(self, x):
        return self.layers[1](self.decide(self.layers[0](x)))


def by_value(x):
    return x * 2 if x.sum() > 0 else x


def by_size(x):
    return x * len(x[x[:, 0] > 0])


@pytest.mark.parametrize("decide", [by_value, by_size])
def test_the_error_for_a_decision_names_the_line_and_a_block_that_works(decide):
    model = nn.Sequential(nn.Linear(4, 4), Encoder(decide), nn.Linear(4, 4))
    with torch.no_grad():
        model[1].layers[0].weight.copy_(model[0].weight.copy_(torch.eye(4)))
        model[1].layers[0].bias.copy_(model[0].bias.zero_())
    captured = penstock.capture(model, (torch.ones(3, 4),), depth=9)
    run = StageSequence(captured, uniform(captured.graph, 2))
    with pytest.raises(CaptureError) as caught:
        run(-torch.ones(3, 4))
    line = decide.__code__.co_firstlineno + 1
    assert caught.value.values["line"] == f"{__file__}:{line}"
    module = caught.value.values["module"]
    assert caught.value.hint.startswith(f'basic_blocks=["{module}"]')
    captured = penstock.capture(model, (torch.ones(3, 4),), basic_blocks=[module])
    run = StageSequence(captured, uniform(captured.graph, 2))
    assert torch.equal(run(-torch.ones(3, 4)), model(-torch.ones(3, 4)))
