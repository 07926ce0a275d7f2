"""A backward that is split gives the gradients of a whole one, bit for bit."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from penstock.errors import PartitionError
from penstock.stages import deferred_functions
from penstock.stages.deferral import Deferral
from tests.parity import assert_close, assert_identical
from tests.stages.blocks import AT_ONCE, WAITING, Does, rows
from tests.stages.second_stage import SecondStage


def behind(table, name):
    torch.manual_seed(0)
    build, example = table[name]
    return SecondStage(build(), example)


@pytest.mark.parametrize("name", WAITING)
def test_deferred_weight_gradients_are_those_of_a_whole_backward(name):
    module, waiting = behind(WAITING, name), []

    def look():
        waiting.extend(p for p in module.stage.parameters() if p.requires_grad and p.grad is None)

    assert_identical(module.gradients(False), module.gradients(True, look))
    assert waiting


@pytest.mark.parametrize("name", AT_ONCE)
def test_weight_gradients_that_cannot_be_deferred_are_computed_with_the_input_gradients(name):
    module, waiting = behind(AT_ONCE, name), []

    def look():
        waiting.extend(p for p in module.stage.parameters() if p.requires_grad and p.grad is None)

    assert_identical(module.gradients(False), module.gradients(True, look))
    assert waiting == []


@pytest.mark.parametrize("weight", [lambda x: x, lambda x: x[1:].T.T], ids=["itself", "a view"])
def test_a_received_value_that_is_a_weight_has_its_whole_gradient_before_the_weight_gradients(weight):
    forward = lambda x, a: functional.linear(a(x), weight(x), weight(x).T.flatten()[: len(weight(x))])  # noqa: E731
    module = SecondStage(Does(forward, nn.Linear(8, 8)), rows(4, 8))
    module.received = (module.input_name,)
    assert_identical(module.gradients(False), module.gradients(True))


def test_a_stage_notes_that_no_weight_gradient_can_be_deferred():
    module = behind(AT_ONCE, "a reentrant checkpoint")
    module.gradients(True)
    assert module.stage.split_backward_note.startswith("none of the weight gradients can be deferred")


def test_a_stage_that_defers_all_weight_gradients_has_no_note():
    module = behind(WAITING, "layers")
    module.gradients(True)
    assert module.stage.split_backward_note == ""


def test_a_compiled_block_is_left_alone():
    # All compiled modules of a process share one limit on recompilations: other tests may have reached it.
    torch.compiler.reset()
    compiled = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.GELU()))
    module = SecondStage(compiled, rows(4, 8))
    compiled[1].compile(backend="aot_eager")
    waiting = []

    def look():
        waiting.extend(name for name, p in module.stage.named_parameters() if p.grad is None)

    assert_identical(module.gradients(True, look), module.gradients(False))
    assert waiting == ["1.0.weight", "1.0.bias"]


def test_hooks_on_parameters_see_the_gradient_of_each_microbatch_once():
    def seen(is_split):
        module, calls = behind(WAITING, "a weight used twice"), []
        weight = module.model[1].parts[0].weight
        weight.register_hook(lambda gradient: calls.append(gradient.clone()))
        weight.register_post_accumulate_grad_hook(lambda parameter: calls.append(parameter.grad.clone()))
        module.gradients(is_split)
        return calls

    whole, parts = seen(False), seen(True)
    assert len(whole) == len(parts) == 6
    assert all(map(torch.equal, whole, parts))


def test_a_value_written_after_it_was_multiplied_is_refused():
    class Writing(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            x = x * 2
            y = self.linear(x)
            x.add_(1)
            return y

    run = SecondStage(Writing(), rows(4, 8)).run(is_split=True)
    run.input_grad(dict.fromkeys(run.take_outputs(), torch.ones(4, 8)))
    with pytest.raises(RuntimeError, match="needed for a weight gradient has been written in place"):
        run.weight_grad()


def test_a_model_moved_to_another_dtype_between_two_steps_gets_new_accumulators():
    module = behind(WAITING, "layers")
    module.gradients(True)
    module.model.double()
    moved = SecondStage(module.model[1], rows(4, 8, dtype=torch.float64))
    moved.stage._deferred_accumulator = module.stage._deferred_accumulator
    assert_identical(moved.gradients(False), moved.gradients(True))


def test_a_stage_can_be_copied_after_a_split_backward():
    module = behind(WAITING, "layers")
    module.gradients(True)
    assert copy.deepcopy(module.stage).state_dict().keys() == module.stage.state_dict().keys()


def test_gradients_kept_on_values_are_those_of_a_whole_backward():
    seen = []

    def forward(x, one, two):
        x = one(x)
        x.retain_grad()
        seen.append(x)
        return two(x)

    module = SecondStage(Does(forward, nn.Linear(8, 8), nn.Linear(8, 6)), rows(4, 8))
    for is_split in (False, True):
        module.gradients(is_split)
    assert all(torch.equal(one.grad, other.grad) for one, other in zip(seen[-6:-3], seen[-3:], strict=True))


def implicit(x, layer):
    """A step of a fixed-point iteration, whose backward hook solves for the gradient by backward through the step."""
    result = layer(x).tanh()
    start = result.detach().requires_grad_()
    step = layer(start).tanh()

    def solve(gradient):
        step.backward(gradient, retain_graph=True)
        solution = gradient
        for _ in range(3):
            (found,) = torch.autograd.grad(step, start, solution, retain_graph=True)
            solution = gradient + found
        step.backward(solution, retain_graph=True, inputs=(start,))
        return solution

    result.register_hook(solve)
    return result


def test_gradients_that_hooks_take_of_chosen_tensors_are_not_added_to_the_weights():
    module = SecondStage(Does(implicit, nn.Linear(8, 8)), rows(4, 8))
    # Not bit for bit: the gradients of one weight by several backwards are added in another order.
    assert_close(module.gradients(False), module.gradients(True), tolerance=1e-6)


class Special(torch.Tensor):
    """A kind of tensor of its own."""


def test_weights_of_another_kind_are_left_alone():
    linear = nn.Linear(8, 6, bias=False)
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Special))
    table = {functional.linear: deferred_functions.DEFERRABLE[functional.linear]}
    deferral = Deferral(table)
    deferral.is_forward = True
    with deferral:
        result = linear(rows(4, 8).requires_grad_())
    result.sum().backward()
    assert deferral.queue == []
    assert linear.weight.grad is not None


def test_a_stage_notes_a_small_share_of_deferred_weight_gradients():
    module = SecondStage(nn.Sequential(nn.Linear(8, 8), nn.LSTM(8, 32)), rows(4, 8))
    run = module.run(is_split=True)
    run.backward({name: torch.ones_like(value) for name, value in run.take_outputs().items()})
    assert module.stage.split_backward_note.startswith("only 1% of the weight gradients can be deferred")


def test_a_gradient_that_was_not_recorded_is_refused():
    """What was deferred before it would be missing in it."""
    block = Does(lambda x, a: a(x) if block.is_plain else torch.autograd.grad(a(x).sum(), x)[0], nn.Linear(8, 8))
    block.is_plain = True
    module = SecondStage(block, rows(4, 8))
    block.is_plain = False
    with pytest.raises(PartitionError, match=r"must not take gradients.*\(function: grad\)\ntry: a schedule"):
        module.run(True)
