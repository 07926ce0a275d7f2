"""A StageRun keeps no more than it needs, and takes gradients for its outputs and for values computed from them."""

import weakref

import torch
from torch import nn

from penstock.stages import StageRun
from tests.stages.blocks import Does, rows
from tests.stages.second_stage import SecondStage


def gone(*references):
    return [reference() is None for reference in references]


def test_outputs_are_handed_out_once_and_then_released():
    run = SecondStage(nn.Linear(8, 6), rows(4, 8)).run(is_split=False)
    ((name, value),) = run.take_outputs().items()
    reference = weakref.ref(value)
    del value
    assert gone(reference) == [True]
    assert run.take_outputs() == run.outputs == {}
    (returned,) = run.backward({name: torch.ones(4, 6)}).values()
    assert returned.shape == (4, 8)


def test_a_loss_of_the_outputs_is_a_root_like_any_other():
    module = SecondStage(nn.Linear(8, 6), rows(4, 8))
    run = module.run(is_split=False)
    (value,) = run.take_outputs().values()
    run.add_root("loss", value.square().sum())
    run.backward({"loss": torch.tensor(0.5)})
    expected = torch.autograd.grad(0.5 * module.model[1](rows(4, 8)).square().sum(), module.model[1].weight)[0]
    assert torch.equal(module.model[1].weight.grad, expected)


def test_missing_gradients_and_unknown_values_are_skipped():
    run = SecondStage(nn.Linear(8, 6), rows(4, 8)).run(is_split=False)
    run.add_root("count", torch.tensor(3))
    returned = run.backward(dict.fromkeys(run.outputs) | {"count": torch.ones(()), "other": None})
    assert list(returned.values()) == [None]


class Traced(torch.autograd.Function):
    """Keeps an object for as long as its node is there."""

    @staticmethod
    def forward(ctx, x, marker):
        ctx.marker = marker
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2, None


class Marker:
    """An object whose lifetime is observed."""


def test_after_the_input_gradients_the_graph_is_gone_and_only_the_queue_is_left():
    references = []

    def forward(x, one, two):
        marker = Marker()
        references.append(weakref.ref(marker))
        return two(Traced.apply(one(x), marker))

    run = SecondStage(Does(forward, nn.Linear(8, 8), nn.Linear(8, 6)), rows(4, 8)).run(is_split=True)
    assert gone(references[-1]) == [False]
    run.input_grad(dict.fromkeys(run.take_outputs(), torch.ones(4, 6)))
    assert gone(references[-1]) == [True]
    assert len(run._deferral.queue) == 2
    run.weight_grad()
    assert run._deferral.queue == []


def test_after_the_weight_gradients_nothing_is_kept():
    run = SecondStage(nn.Linear(8, 6), rows(4, 8)).run(is_split=True)
    gradient = torch.ones(4, 6)
    run.input_grad(dict.fromkeys(run.take_outputs(), gradient))
    reference = weakref.ref(gradient)
    del gradient
    assert gone(reference) == [False]
    run.weight_grad()
    assert gone(reference) == [True]


def test_a_first_stage_has_only_weight_gradients():
    module = SecondStage(nn.Linear(8, 6), rows(4, 8))
    recording, incoming = module.captured.example_recording, {module.input_name: rows(4, 8)}
    run = StageRun(module.stage, recording, {}, incoming, splits_backward=True)
    gradients = dict.fromkeys(run.take_outputs(), torch.ones(4, 6))
    assert run.input_grad(gradients) == {}
    assert module.model[1].weight.grad is None
    run.weight_grad()
    assert torch.equal(module.model[1].weight.grad, torch.ones(4, 6).T @ rows(4, 8))


def test_a_run_for_a_split_backward_can_still_run_it_whole():
    module = SecondStage(nn.Linear(8, 6), rows(4, 8))
    for is_split in (False, True):
        run = module.run(is_split)
        run.backward(dict.fromkeys(run.take_outputs(), torch.ones(4, 6)))
    whole = torch.ones(4, 6).T @ rows(4, 8)
    assert torch.equal(module.model[1].weight.grad, whole + whole)


def test_a_whole_backward_does_without_the_deferral():
    seen = []

    def forward(x, one):
        x = one(x)
        seen.append(x.grad_fn.next_functions)
        return x

    module = SecondStage(Does(forward, nn.Linear(8, 6)), rows(4, 8))
    module.run(is_split=False)
    assert len(seen[-1]) == 3
    assert [node is None for node, _ in seen[-1]] == [False, False, False]
    module.run(is_split=True)
    assert [node is None for node, _ in seen[-1]] == [True, False, True]
