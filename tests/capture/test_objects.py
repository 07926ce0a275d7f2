"""What a block returns besides tensors is the same in every replay, or the batch is recorded anew or refused."""

import functools

import numpy as np
import pytest
import torch
from torch import nn

import penstock
from penstock.errors import CaptureError
from penstock.partitioners import uniform
from penstock.stages import StageSequence
from tests.capture.models import Block

POSITIVE = torch.rand(4, 8, generator=torch.Generator().manual_seed(0)) + 0.1


class Holding:
    """An object with nothing but numbers."""

    def __init__(self, number):
        self.number = number


class Giving(nn.Module):
    """Returns a tensor, and what `make` makes of it and of how many numbers were positive."""

    def __init__(self, make):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.make = make

    def forward(self, x):
        y = self.linear(x)
        return self.make(y, int((x > 0).sum()))


class Taking(nn.Module):
    """Multiplies by what it is given."""

    def __init__(self, use):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.use = use

    def forward(self, x, given):
        return self.linear(x) * self.use(given)


class Pair(nn.Module):
    """One block gives, another takes, with two between."""

    def __init__(self, make, use):
        super().__init__()
        self.first = nn.ModuleList([Giving(lambda y, number: (y, make(y, number))), Block()])
        self.last = nn.ModuleList([Block(), Taking(use)])

    def forward(self, x):
        x, given = self.first[0](x)
        return self.last[1](self.last[0](self.first[1](x)), given)


def outcome(model, batch):
    """Whether stages give what the model gives, or the words in which they refuse."""
    captured = penstock.capture(model, (POSITIVE,))
    run = StageSequence(captured, uniform(captured.graph, 2))
    assert torch.equal(run(POSITIVE), model(POSITIVE))
    try:
        return torch.equal(run(batch), model(batch))
    except CaptureError as error:
        return error.problem


COMPARED = {
    "a number of numpy": (lambda y, number: np.int64(number), float),
    "a set": (lambda y, number: {number}, lambda given: float(next(iter(given)))),
    "a complex number": (lambda y, number: complex(number), abs),
}


@pytest.mark.parametrize("kind", COMPARED)
def test_a_value_that_comes_out_otherwise_is_refused(kind):
    assert outcome(Pair(*COMPARED[kind]), POSITIVE) is True
    assert "data-dependent control flow" in outcome(Pair(*COMPARED[kind]), -POSITIVE)


def test_a_block_that_returns_an_object_is_opened_to_see_what_it_holds():
    model = Pair(lambda y, number: Holding(number), lambda given: given.number)
    assert outcome(model, -POSITIVE) is True
    names = {node.name for node in penstock.capture(model, (POSITIVE,)).graph.nodes}
    assert "first.0.linear" in names
    assert "last.1" in names


HIDING = {
    "a closure": (lambda y, number: lambda: y, lambda given: given()),
    "a partial": (lambda y, number: functools.partial(torch.mul, y), lambda given: given(2)),
    "a method": (lambda y, number: y.mul, lambda given: given(2)),
    "a generator": (lambda y, number: (y for _ in range(2)), lambda given: next(given)),
}


@pytest.mark.parametrize("kind", HIDING)
def test_tensors_that_are_hidden_in_an_object_are_found(kind):
    with pytest.raises(CaptureError, match=r"holds tensors is passed .*where: last.1\)\ntry: .*basic_blocks"):
        penstock.capture(Pair(*HIDING[kind]), (POSITIVE,))


def test_a_hook_that_remembers_an_activation_is_refused():
    class Hooking(Pair):
        def forward(self, x):
            x = self.last[0](x)
            kept = x.detach()
            x.register_hook(lambda gradient: gradient * kept)
            return self.first[1](x)

    with pytest.raises(CaptureError, match=r"object: function, where: /register_hook"):
        penstock.capture(Hooking(None, None), (POSITIVE,))


STRUCTURES = {
    "one or a tuple": (lambda y: y, lambda y: (y,)),
    "one more": (lambda y: (y, y * 2), lambda y: y),
    "another key": (lambda y: {"a": y}, lambda y: {"b": y}),
    "another order": (lambda y: {"a": y, "b": y * 3}, lambda y: {"b": y * 3, "a": y}),
    "another nesting": (lambda y: [(y,), (y * 2, y)], lambda y: [(y, y * 2), (y,)]),
    "an integer or a truth": (lambda y: (y, 1), lambda y: (y, True)),
    "not a number": (lambda y: (y, float("nan")), lambda y: (y, 1.0)),
}


class Structured(nn.Module):
    """Goes by the structure of what a block returns."""

    def __init__(self, one, other):
        super().__init__()
        self.first = nn.ModuleList([Giving(lambda y, number: one(y) if number else other(y)), Block()])
        self.last = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        found = self.first[0](x)
        while not isinstance(found, torch.Tensor):
            found = found["a"] * 2 if isinstance(found, dict) and "a" in found else found
            found = found["b"] * 3 if isinstance(found, dict) else found
            found = found[0] if isinstance(found, list | tuple) else found
        return self.last[1](self.last[0](self.first[1](found)))


@pytest.mark.parametrize("kind", STRUCTURES)
def test_a_block_that_returns_another_structure_is_refused(kind):
    for pair in (STRUCTURES[kind], STRUCTURES[kind][::-1]):
        assert "data-dependent control flow" in outcome(Structured(*pair), -POSITIVE)


class Counted(nn.Module):
    """Returns how often it ran."""

    def __init__(self):
        super().__init__()
        self.block, self.calls = Block(), 0

    def forward(self, x):
        self.calls += 1
        return self.block(x), self.calls


def test_a_number_in_the_output_that_changes_each_time_is_refused():
    with pytest.raises(CaptureError, match=r"runs differently each time: .*where: the output of the model"):
        penstock.capture(Counted(), (POSITIVE,))
