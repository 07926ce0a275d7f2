"""Hooks on blocks see the forwards of the user and no others."""

from functools import partial

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import CaptureError
from penstock.partitioners import uniform
from penstock.stages import StageSequence
from tests.capture.models import Leaking, Stack
from tests.parity import assert_stages_train_like_the_model

BATCH = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def counting(*modules):
    """A list that grows with every forward of the modules, by hooks before and after it."""
    seen = []
    for module in modules:
        module.register_forward_pre_hook(lambda *_: seen.append("before"))
        module.register_forward_hook(lambda *_, **__: seen.append("after"), with_kwargs=True, always_call=True)
    return seen


@pytest.mark.parametrize("part", ["blocks.1", "blocks.1.linear", "head"])
def test_hooks_on_a_block_and_inside_it_see_replays_and_no_capture(part):
    model = Stack()
    seen = counting(model.get_submodule(part))
    captured = penstock.capture(model, (BATCH,))
    assert seen == []
    StageSequence(captured, uniform(captured.graph, 3))(BATCH)
    assert seen == ["before", "after"]


def test_a_new_form_in_the_middle_of_training_is_recorded_in_silence():
    model = Stack()
    seen = counting(model.blocks[1])
    captured = penstock.capture(model, (BATCH,))
    run = StageSequence(captured, uniform(captured.graph, 3))
    run(BATCH), run(BATCH[:4]), run(BATCH[:4])
    assert captured.num_recordings == 2
    assert seen == ["before", "after"] * 3


def test_hooks_of_opened_modules_do_run():
    model = Stack()
    seen = counting(model)
    penstock.capture(model, (BATCH,))
    assert set(seen) == {"before", "after"}


def test_a_leaf_that_must_be_opened_has_its_hooks_recorded():
    model = Leaking()
    model.blocks[1].register_forward_hook(lambda module, given, result: result * 2)
    captured = penstock.capture(model, (torch.randn(2, 8),))
    assert "blocks.1/mul" in {node.name for node in captured.graph.nodes}
    penstock.split(captured, uniform(captured.graph, 3))


def test_hooks_are_the_same_and_in_the_same_order_afterwards():
    model = Stack()
    counting(model.blocks[1], model.blocks[1])
    before = [list(hooks.items()) for hooks in (model.blocks[1]._forward_hooks, model.blocks[1]._forward_pre_hooks)]
    penstock.capture(model, (BATCH,))
    after = [list(hooks.items()) for hooks in (model.blocks[1]._forward_hooks, model.blocks[1]._forward_pre_hooks)]
    assert before == after


def test_a_hook_that_is_registered_by_the_forward_runs():
    class Registering(Stack):
        def forward(self, x):
            handle = self.blocks[1].register_forward_hook(lambda module, given, result: self.kept.append(result))
            self.kept = []
            x = super().forward(x)
            handle.remove()
            return x + self.kept[0].mean()

    captured = penstock.capture(Registering().eval(), (BATCH,))
    assert_stages_train_like_the_model(captured, uniform(captured.graph, 2))


COLLECTED = []


class Collecting(Stack):
    """Adds the mean of the activations that hooks have collected since the forward began, if there are any."""

    def __init__(self, kind):
        super().__init__()
        self.found = []
        hooks = {
            "closure": lambda module, given, result: self.found.append(result),
            "method": self.collect,
            "partial": partial(self.collect, unused=0),
            "global": lambda module, given, result: COLLECTED.append(result),
            "attribute": keep_result,
        }
        self.blocks[1].linear.register_forward_hook(hooks[kind])

    def collect(self, module, given, result, unused=None):
        self.found = [*self.found, result]

    def forward(self, x):
        self.found, self.blocks[1].linear.kept = [], None
        COLLECTED.clear()
        x = super().forward(x)
        kept = self.blocks[1].linear.kept
        return x + sum(
            each.mean(1, keepdim=True) for each in (*self.found, *COLLECTED, *([] if kept is None else [kept]))
        )


def keep_result(module, given, result):
    module.kept = result


@pytest.mark.parametrize("kind", ["closure", "method", "partial", "global", "attribute"])
def test_activations_that_a_hook_collects_for_the_model_are_recorded(kind):
    model = Collecting(kind)
    captured = penstock.capture(model, (BATCH,))
    assert "blocks.1.linear/linear" in {node.name for node in captured.graph.nodes}
    penstock.split(captured, uniform(captured.graph, 3))  # compares with the model


@pytest.mark.parametrize("stages", [2, 4])
def test_a_hook_that_changes_what_a_block_returns_keeps_parity(stages):
    model = Stack()
    model.blocks[1].register_forward_hook(lambda module, given, result: result * 0.5)
    model.blocks[2].linear.register_forward_pre_hook(lambda module, given: (given[0] + 1,))
    captured = penstock.capture(model, (BATCH,))
    assert_stages_train_like_the_model(captured, uniform(captured.graph, stages))


def test_a_hook_without_which_the_model_fails_is_run():
    class Paired(nn.Linear):
        def forward(self, x):
            return super().forward(x), x

    model = Stack()
    model.blocks[1] = Paired(8, 8)
    model.blocks[1].register_forward_hook(lambda module, given, result: result[0])
    captured = penstock.capture(model, (BATCH,))
    assert_stages_train_like_the_model(captured, uniform(captured.graph, 3))


def test_a_hook_that_changes_shape_or_dtype_of_a_block_result_is_refused():
    model = Stack()
    model.blocks[1].register_forward_hook(lambda module, given, result: result.double())
    model.blocks[2].register_forward_pre_hook(lambda module, given: (given[0].float(),))
    captured = penstock.capture(model, (BATCH,))
    with pytest.raises(CaptureError, match=r"a hook changes the shape.*blocks.1.*found: float64\[6, 8\]\)\ntry: open"):
        penstock.split(captured, uniform(captured.graph, 3))


@pytest.mark.parametrize("norm", [torch.nn.utils.weight_norm, torch.nn.utils.spectral_norm])
@pytest.mark.filterwarnings("ignore")
def test_weights_that_a_hook_of_torch_computes_are_right(norm):
    model = Stack()
    for block in model.blocks:
        norm(block.linear)
    captured = penstock.capture(model, (BATCH,))
    penstock.split(captured, uniform(captured.graph, 3))
    writers = {update.node for update in captured.graph.updates}
    assert ("blocks.1" in writers) == (norm is torch.nn.utils.spectral_norm)


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
@pytest.mark.parametrize("part", ["", "blocks"])
def test_a_backward_hook_on_an_opened_module_is_refused(register, part):
    model = Stack()
    model.blocks = nn.Sequential(*model.blocks)
    model.forward = lambda x: model.head(model.blocks(model.embed(x)))
    getattr(model.get_submodule(part), register)(lambda *_: None)
    with pytest.raises(CaptureError, match=rf"module: {part or 'the model'}\)\ntry: put the hook on a block"):
        penstock.capture(model, (BATCH,))


def test_a_backward_hook_on_a_block_is_called():
    model, seen = Stack(), []
    model.blocks[1].register_full_backward_hook(lambda *_: seen.append("backward"))
    captured = penstock.capture(model, (BATCH,))
    run = StageSequence(captured, uniform(captured.graph, 3))
    run.backward({0: torch.ones_like(run(BATCH))})
    assert seen == ["backward"]


class Packing(Stack):
    """Saves for the backward something else than it computes with."""

    def __init__(self, context):
        super().__init__()
        self.context = context

    def forward(self, x):
        x = self.blocks[0](self.embed(x))
        with self.context():
            x = x * x
        return self.head(self.blocks[1](x))


def test_saving_in_another_way_between_blocks_is_refused():
    def context():
        return torch.autograd.graph.saved_tensors_hooks(lambda saved: saved * 0.5, lambda saved: saved)

    with pytest.raises(CaptureError, match=r"saved_tensors_hooks\) \(module: the model\)\ntry: keep the module"):
        penstock.capture(Packing(context), (BATCH,))


def test_saving_on_the_cpu_between_blocks_changes_no_number():
    captured = penstock.capture(Packing(torch.autograd.graph.save_on_cpu), (BATCH,))
    assert_stages_train_like_the_model(captured, uniform(captured.graph, 2))


def test_inference_mode_between_blocks_is_refused():
    with pytest.raises(CaptureError, match=r"turns inference mode on .*module: the model\)\ntry: torch.no_grad"):
        penstock.capture(Packing(torch.inference_mode), (BATCH,))
