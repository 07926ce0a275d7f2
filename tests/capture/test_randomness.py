"""Calls that draw random numbers are known, and draw the same wherever they run if they are given a seed."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock
from penstock.capture import DrawSeed, Replay
from penstock.partitioners import uniform
from tests.capture.models import Stack

BATCH = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


class Dropping(Stack):
    """Draws in blocks, in a block that calls a function, and between blocks."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.linear = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
        self.blocks[2] = Functional()

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = functional.dropout(block(x), 0.3, self.training)
        return self.head(x + torch.rand(8))


class Functional(nn.Linear):
    """A block without a module that drops."""

    def __init__(self):
        super().__init__(8, 8)

    def forward(self, x):
        return functional.dropout(super().forward(x), 0.5, training=self.training)


def run(captured, stages, seed, order=1):
    """The output of the model played in stages; the generator is somewhere else before each."""
    graph, values = captured.graph, {"x": BATCH}
    partition = uniform(graph, stages)
    for number, nodes in enumerate(partition.runs(graph)):
        wanted = [v.name for c in partition.crossings(graph) if c.producer == number for v in c.values]
        wanted += graph.outputs if number == stages - 1 else ()
        replay = Replay(captured.example_recording, [node.name for node in nodes], captured.model, wanted)
        torch.manual_seed(order * (number + 1))
        values |= replay.run(values, seed)
    return values["head"]


RANDOM = {"blocks.0", "blocks.1", "blocks.2", "blocks.3", "/dropout", "/dropout@2", "/dropout@3", "/dropout@4", "/rand"}


def test_a_graph_marks_nodes_that_draw_random_numbers():
    graph = penstock.capture(Dropping(), (BATCH,)).graph
    assert {node.name for node in graph.nodes if node.is_random} == RANDOM


def test_a_model_without_numbers_draws_the_same():
    with torch.device("meta"):
        model = Dropping()
    graph = penstock.capture(model, (BATCH,)).graph
    assert {node.name for node in graph.nodes if node.is_random} == RANDOM


def test_only_the_glue_draws_in_evaluation():
    graph = penstock.capture(Dropping().eval(), (BATCH,)).graph
    assert [node.name for node in graph.nodes if node.is_random] == ["/rand"]


def test_a_seed_gives_the_same_numbers_in_any_number_of_stages():
    captured = penstock.capture(Dropping(), (BATCH,))
    whole = run(captured, 1, seed=DrawSeed(3))
    assert all(torch.equal(whole, run(captured, stages, seed=DrawSeed(3), order=stages)) for stages in (1, 2, 4))


@pytest.mark.parametrize("seed", [0, 4, -1, 1 << 63])
def test_another_seed_gives_other_numbers(seed):
    captured = penstock.capture(Dropping(), (BATCH,))
    assert not torch.equal(run(captured, 1, seed=DrawSeed(3)), run(captured, 1, DrawSeed(seed)))


def test_calls_of_one_seed_draw_different_numbers():
    model = nn.Sequential(*(nn.Dropout(0.5) for _ in range(4)))
    captured = penstock.capture(model, (torch.ones(64),))
    replay = Replay(captured.example_recording, ["0", "1", "2"], model, ("0", "1", "2"))
    found = replay.run({"input": torch.ones(64)}, seed=DrawSeed(1))
    assert (found["2"] > 0).sum() < (found["1"] > 0).sum() < (found["0"] > 0).sum()


def test_without_a_seed_the_numbers_come_from_torchs_generator():
    captured = penstock.capture(Dropping(), (BATCH,))
    assert torch.equal(run(captured, 1, None, order=5), run(captured, 1, None, order=5))
    assert not torch.equal(run(captured, 1, None, order=5), run(captured, 1, None, order=6))
    torch.manual_seed(5)
    assert torch.equal(captured.model(BATCH), run(captured, 1, None, order=5))


class Noisy(nn.Module):
    """Adds noise, from a source of its own or of everyone's, in a block without parameters."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw
        self.own = torch.Generator().manual_seed(3)
        self.numpys = np.random.default_rng(3)

    def forward(self, x):
        return x + self.draw(self)


NOISES = {
    "numpy": lambda self: float(np.random.randn()),
    "python": lambda self: random.random(),
    "a generator of its own": lambda self: torch.rand(4, generator=self.own),
    "a generator of numpy of its own": lambda self: float(self.numpys.random()),
}


def test_a_block_that_keeps_a_global_generator_and_does_not_draw_is_not_random():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    model[0].numpys, model[1].pythons = np.random.mtrand._rand, random._inst
    assert not any(node.is_random for node in penstock.capture(model, (BATCH,)).graph.nodes)


@pytest.mark.parametrize("noise", NOISES)
def test_a_block_that_draws_from_elsewhere_is_random_and_runs_once(noise):
    model = nn.Sequential(Noisy(NOISES[noise]), nn.Linear(4, 4), nn.Linear(4, 4))
    before = model[0].own.get_state(), model[0].numpys.bit_generator.state
    node = penstock.capture(model, (BATCH,)).graph["0"]
    assert node.is_random
    assert not node.from_inputs
    assert torch.equal(before[0], model[0].own.get_state())
    assert before[1] == model[0].numpys.bit_generator.state


def test_a_function_that_is_given_a_generator_is_random():
    class Drawing(Stack):
        def __init__(self):
            super().__init__()
            self.own = torch.Generator().manual_seed(3)

        def forward(self, x):
            return self.head(self.embed(x) * torch.rand(8, generator=self.own))

    node = penstock.capture(Drawing(), (BATCH,)).graph["/rand"]
    assert node.is_random
    assert not node.from_inputs
