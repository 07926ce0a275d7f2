"""What a forward writes into buffers is right also where every stage has a model of its own."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock
from penstock.capture import Replay
from penstock.errors import CaptureError, PartitionError
from penstock.ir import Update
from penstock.partitioners import cut_at, cut_before, cut_places, uniform
from tests.capture.models import Block, Stack
from tests.parity import assert_stages_train_like_the_model

BATCH = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
NORM = Update("norm", ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"))


class Writing(Stack):
    """Writes state between its blocks in the way that `write` does, before block 1; `read` is called before block 3."""

    def __init__(self, write, read):
        super().__init__()
        self.write, self.read = write, read
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("table", torch.arange(8.0))
        self.count = torch.zeros(())
        self.only = nn.BatchNorm1d(8)

    def forward(self, x):
        x = self.blocks[0](self.embed(x))
        x = self.blocks[1](self.write(self, x))
        x = self.blocks[2](x)
        return self.head(self.blocks[3](x * self.read(self)))


def _no_grad(self, x):
    with torch.no_grad():
        self.table.lerp_(x.mean(0), 0.5)
    return x


def _twice(self, x):
    self.table += 1
    self.table.mul_(2).add_(x.detach().mean(0))
    return x * self.table.mean()


def _through_a_view(self, x):
    part = self.table[2:4]
    self.table += 1
    part.mul_(3)
    self.table[0].add_(1)
    return x + part.sum()


def _by_a_kernel(self, x):
    return functional.batch_norm(x, self.only.running_mean, self.only.running_var, training=True)


WRITES = {
    "a counter": (lambda self, x: (self.steps.add_(1), x)[1], lambda self: self.steps),
    "without gradients": (_no_grad, lambda self: self.table),
    "twice and in a chain": (_twice, lambda self: self.table),
    "through a view": (_through_a_view, lambda self: self.table.sum()),
    "a part": (lambda self, x: (self.table.__setitem__(slice(2), 7.0), x)[1], lambda self: self.table.sum()),
    "through data": (lambda self, x: (self.steps.data.add_(1), x)[1], lambda self: self.steps),
    "a plain tensor": (lambda self, x: (self.count.add_(1), x)[1], lambda self: self.count),
    "by a kernel that counts no version": (_by_a_kernel, lambda self: self.only.running_var),
    "inside a block": (lambda self, x: self.only(x), lambda self: self.only.running_mean + 1),
    "with a gradient": (lambda self, x: (self.table.copy_(x.mean(0)), self.table.detach_(), x)[2], lambda s: s.table),
}


class Ranks:
    """Every stage on a copy of the model of its own, as on ranks; values are copied on their way."""

    def __init__(self, model, cuts):
        graph = penstock.capture(model, (BATCH,)).graph
        self.partition = cut_before(graph, cuts)
        self.copies = [copy.deepcopy(model) for _ in self.partition.stages]
        self.parts = [self._part(index, own) for index, own in enumerate(self.copies)]

    def _part(self, index, model):
        captured = penstock.capture(model, (BATCH,))
        graph = captured.graph
        wanted = [v.name for c in self.partition.crossings(graph) if c.producer == index for v in c.values]
        wanted += graph.outputs if index == self.partition.num_stages - 1 else ()
        nodes = [node.name for node in self.partition.runs(graph)[index]]
        return Replay(captured.example_recording, nodes, model, wanted)

    def __call__(self, x):
        values = {"x": x}
        for part in self.parts:
            values |= {name: value.clone() for name, value in part.run(values).items()}
        return values["head"]


@pytest.mark.parametrize("way", WRITES)
def test_a_later_stage_on_another_rank_reads_what_was_written(way):
    model = Writing(*WRITES[way])
    ranks = Ranks(model, ["blocks.2", "blocks.3"])
    for step in range(3):
        assert torch.equal(ranks(BATCH + step), model(BATCH + step))
    owner = dict(ranks.copies[0].named_buffers())
    for name in ("steps", "table", "only.running_mean", "only.num_batches_tracked"):
        assert torch.equal(owner[name], dict(model.named_buffers())[name])


@pytest.mark.parametrize("way", WRITES)
@pytest.mark.parametrize("depth", [None, 9])
def test_stages_train_like_a_model_that_writes_its_state(way, depth):
    captured = penstock.capture(Writing(*WRITES[way]), (BATCH,), depth=depth)
    assert_stages_train_like_the_model(captured, uniform(captured.graph, 3))


def test_microbatches_that_are_under_way_keep_what_they_read():
    model = Writing(*WRITES["a counter"])
    captured = penstock.capture(model, (BATCH,))
    replay = Replay(captured.example_recording, [node.name for node in captured.graph.nodes], model, ("head",))
    first, second = (replay.run({"x": BATCH})["head"] for _ in range(2))
    second.sum().backward()
    first.sum().backward()
    assert not torch.equal(first, second)


def test_a_graph_lists_written_state():
    graph = penstock.capture(Writing(*WRITES["a counter"]), (BATCH,)).graph
    assert graph.updates == (Update("/add", ("steps",)),)
    assert [node.name for node in graph.updated["steps"]] == ["/add"]
    assert [value.name for value in graph["/add"].makes] == ["/add!0"]


def test_a_batch_norm_writes_in_training_and_not_in_evaluation():
    model = Stack()
    assert penstock.capture(model, (BATCH,)).graph.updates == (NORM,)
    assert penstock.capture(model.eval(), (BATCH,)).graph.updates == ()


def test_a_batch_norm_without_numbers_writes_all_the_same():
    with torch.device("meta"):
        model = Stack()
    assert penstock.capture(model, (BATCH,)).graph.updates == (NORM,)


class ReadBefore(Stack):
    """Reads a buffer in one place and writes it later."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.ones(()))

    def forward(self, x):
        x = self.blocks[0](self.embed(x)) - self.steps
        x = self.blocks[1](x)
        self.steps += 1
        return self.head(self.blocks[2](x) * self.steps)


class WrittenTwice(ReadBefore):
    """Writes a buffer in two places."""

    def forward(self, x):
        self.steps += 1
        x = self.blocks[1](self.blocks[0](self.embed(x)))
        self.steps += 1
        return self.head(self.blocks[2](x) * self.steps)


class NormTwice(Stack):
    """Calls one batch norm twice."""

    def forward(self, x):
        x = self.blocks[0](self.norm(self.embed(x)))
        return self.head(self.norm(self.blocks[1](x)))


TORN = {
    ReadBefore: r"name: 'steps', written by: '/add' in stage 1, used by: '/sub' in stage 0, '/add' in stage 1",
    WrittenTwice: r"name: 'steps', written by: '/add' in stage 0, '/add@2' in stage 1",
    NormTwice: r"name: 'norm.num_batches_tracked', written by: 'norm' in stage 0, 'norm@2' in stage 1",
}


@pytest.mark.parametrize("kind", TORN)
def test_a_cut_between_users_of_written_state_is_refused(kind):
    captured = penstock.capture(kind(), (BATCH,))
    partition = cut_before(captured.graph, ["blocks.1"])
    with pytest.raises(PartitionError, match=TORN[kind]):
        penstock.split(captured, partition)


@pytest.mark.parametrize("kind", TORN)
def test_other_cuts_keep_users_of_written_state_together(kind):
    captured = penstock.capture(kind(), (BATCH,))
    for place in cut_places(captured.graph):
        assert_stages_train_like_the_model(captured, cut_at(captured.graph, [place]))


def test_one_batch_norm_may_be_called_in_two_stages_in_evaluation():
    captured = penstock.capture(NormTwice().eval(), (BATCH,))
    assert_stages_train_like_the_model(captured, cut_before(captured.graph, ["blocks.1"]))


def test_a_batch_norm_inside_two_blocks_keeps_them_together():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(4)))
    model[2][1] = model[1][1]
    captured = penstock.capture(model, (BATCH,))
    assert cut_places(captured.graph) == [1, 3]
    with pytest.raises(PartitionError, match=r"name: '1.1.num_batches_tracked', .*'1' in stage 0, '2' in stage 1"):
        penstock.split(captured, cut_before(captured.graph, ["2"]))


class Reaching(Block):
    """A block that uses a buffer of another module."""

    def __init__(self, owner):
        super().__init__()
        self.reached = (owner,)

    def forward(self, x):
        return super().forward(x) * self.reached[0].steps


def test_a_block_that_uses_the_state_of_another_module_is_opened():
    model = WrittenTwice()
    model.blocks[2] = Reaching(model)
    graph = penstock.capture(model, (BATCH,)).graph
    assert graph["blocks.2/mul"].reads == ("blocks.2/add", "/add@2!0")


class Initialising(Stack):
    """Looks at a buffer to know whether it runs for the first time."""

    def __init__(self):
        super().__init__()
        self.register_buffer("is_ready", torch.zeros((), dtype=torch.bool))

    def forward(self, x):
        if not self.is_ready:
            self.is_ready.fill_(True)
        return self.head(self.blocks[1](self.blocks[0](self.embed(x))))


def test_a_decision_by_a_buffer_that_is_written_is_refused():
    captured = penstock.capture(Initialising(), (BATCH,))
    with pytest.raises(PartitionError, match=r"depends on a buffer that the model writes.*buffers: \['is_ready'\]"):
        penstock.split(captured, uniform(captured.graph, 2))


class Replacing(Stack):
    """Puts another tensor in the place of one that it reads."""

    def __init__(self):
        super().__init__()
        self.count = torch.zeros(())

    def forward(self, x):
        self.count = self.count + 1
        return self.head(self.embed(x) * self.count)


def test_a_plain_tensor_that_is_read_and_replaced_is_refused():
    with pytest.raises(CaptureError, match=r"replaced during the forward \(name: count\)"):
        penstock.capture(Replacing(), (BATCH,))


class Tracking(nn.Module):
    """Returns nothing and keeps a mean."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.detach().mean(0))


class Tracked(Stack):
    """Shows a block that returns nothing what it computes."""

    def __init__(self):
        super().__init__()
        self.blocks[3] = Tracking()

    def forward(self, x):
        x = self.blocks[1](self.blocks[0](self.embed(x)))
        self.blocks[3](x)
        return self.head(self.blocks[2](x))


def test_a_block_that_returns_nothing_is_called_all_the_same():
    captured = penstock.capture(Tracked(), (BATCH,))
    assert captured.graph.updates == (Update("blocks.3", ("blocks.3.mean",)),)
    penstock.split(captured, uniform(captured.graph, 3))


class Quantized(nn.Module):
    """Assigns a new tensor to a buffer of its part in every forward, and reads it."""

    def __init__(self):
        super().__init__()
        self.part = nn.Sequential(Block(), Block())
        self.part.register_buffer("largest", torch.ones(()))

    def forward(self, x):
        self.part.largest = x.detach().abs().max()
        return self.part[1](self.part[0](x) / self.part.largest)


def test_the_hint_names_the_smallest_module_that_can_be_recorded_as_one_block():
    model = Stack()
    model.blocks = nn.Sequential(nn.Sequential(Quantized(), Block()), Block())
    with pytest.raises(CaptureError, match=r"replaced during.*\(name: (.*)\.part\.largest\)") as caught:
        penstock.capture(model, (BATCH,), depth=9)
    assert caught.value.hint == 'basic_blocks=["blocks.0.0"], which keeps that module whole'
    graph = penstock.capture(model, (BATCH,), depth=9, basic_blocks=["blocks.0.0"]).graph
    assert graph["blocks.0.0"].is_block
