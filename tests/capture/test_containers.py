"""Objects that hold tensors are containers: their tensors cross cuts, and blocks may put new ones into them."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import register_pytree_node

import penstock
from penstock.errors import CaptureError
from penstock.partitioners import uniform
from penstock.stages import StageSequence
from tests.capture.models import Block
from tests.codegen.generated import generated, step_of_file
from tests.parity import Batch, StagedModel, WholeModel, assert_close, assert_identical, one_step
from tests.plans import quick_plan

BATCH = Batch((torch.randn(4, 8, generator=torch.Generator().manual_seed(0)),), {}, False)


def whole(model, batch=BATCH):
    return one_step(WholeModel(model, batch.loss_fn), batch)


def staged(captured, num_stages, batch=BATCH, is_split=False):
    partition = uniform(captured.graph, num_stages)
    return one_step(StagedModel(captured, partition, batch.loss_fn, is_split), batch)


class Entry:
    """A part of a cache, with nothing in it at first."""

    def __init__(self):
        self.keys, self.is_filled = None, False


class Cache:
    """Grows an entry for each block, as the key-value caches of decoders do."""

    def __init__(self):
        self.entries, self.num_tokens = [], 0

    def update(self, place, keys):
        while len(self.entries) <= place:
            self.entries.append(Entry())
        self.entries[place].keys, self.entries[place].is_filled = keys, True
        self.num_tokens += len(keys)


class Slotted:
    __slots__ = ("__held", "tensors")

    def __init__(self):
        self.tensors, self.__held = [], "kept"

    def update(self, place, keys):
        assert self.__held == "kept"
        self.tensors.append(keys)


class Registered:
    """Registered with torch's pytree, without which a callable object is no container."""

    def __init__(self, tensors=()):
        self.tensors = list(tensors)

    def __call__(self):
        raise AssertionError("never called")

    def update(self, place, keys):
        self.tensors.append(keys)


register_pytree_node(Registered, lambda thing: (thing.tensors, None), lambda items, _: Registered(items))


@dataclass
class Fields:
    tensors: list[Any] = field(default_factory=list)

    def update(self, place, keys):
        self.tensors.append(keys)


def update(holder, place, keys):
    if isinstance(holder, list):
        holder.append(keys)
    elif isinstance(holder, dict | SimpleNamespace):
        (holder if isinstance(holder, dict) else vars(holder))[f"block{place}"] = keys
    else:
        holder.update(place, keys)


def held_tensors(holder):
    if isinstance(holder, Cache):
        return [entry.keys for entry in holder.entries if entry.is_filled]
    if isinstance(holder, dict | SimpleNamespace):
        return list((holder if isinstance(holder, dict) else vars(holder)).values())
    return holder if isinstance(holder, list) else holder.tensors


class Remembering(Block):
    """Puts a tensor into what it is given, and uses all that are in it."""

    def __init__(self, place):
        super().__init__()
        self.place = place

    def forward(self, x, holder):
        update(holder, self.place, self.linear(x))
        return x + torch.tanh(sum(held_tensors(holder)))


class Decoder(nn.Module):
    """Blocks that share one holder of tensors, which the model returns too."""

    def __init__(self, make):
        super().__init__()
        self.blocks = nn.ModuleList(Remembering(place) for place in range(4))
        self.make = make

    def forward(self, x):
        holder = self.make()
        for block in self.blocks:
            x = block(x, holder=holder)
        return {"x": x * held_tensors(holder)[0].sigmoid(), "holder": holder}


KINDS = {
    "an object": Cache,
    "slots": Slotted,
    "a pytree node": Registered,
    "a dataclass": Fields,
    "a namespace": SimpleNamespace,
    "a list": list,
    "a dict": dict,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_holder_that_blocks_fill_crosses_cuts(kind):
    model = Decoder(KINDS[kind])
    captured = penstock.capture(model, BATCH.args)
    assert [node.name for node in captured.graph.nodes if node.is_block] == [f"blocks.{n}" for n in range(4)]
    expected = whole(model, BATCH.other())
    for is_split in (False, True):
        assert_close(staged(captured, 3, BATCH.other(), is_split), expected, 1e-6)
    found = StageSequence(captured, uniform(captured.graph, 3))(*BATCH.args)["holder"]
    assert type(found) is KINDS[kind]
    assert len(held_tensors(found)) == 4


def test_a_block_that_fills_a_holder_is_recomputed_on_the_holder_as_it_was():
    model = Decoder(Cache)
    captured = penstock.capture(model, BATCH.args)
    run = StageSequence(captured, uniform(captured.graph, 2))
    for stage in run.stages:
        stage.recomputes = True
    run(*BATCH.args)
    run.backward({0: torch.ones(4, 8)})
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model(*BATCH.args)["x"].sum().backward()
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


def sum_of_output(output, target):
    return output["x"].sum()


def test_a_pipeline_trains_with_a_holder_and_merges_those_of_the_microbatches():
    model = Decoder(Cache)
    plan = quick_plan(model, BATCH.args, ranks=2, microbatches=2, loss_fn=sum_of_output)
    assert penstock.check(model, plan, BATCH.args, loss_fn=sum_of_output).ok
    pipe = penstock.Pipeline(model, plan, loss_fn=sum_of_output, local=True)
    found = pipe.eval(*BATCH.args, return_outputs=True)
    torch.testing.assert_close(held_tensors(found.outputs["holder"]), held_tensors(model(*BATCH.args)["holder"]))


def test_a_model_without_weights_is_recorded_with_its_holder():
    with torch.device("meta"):
        model = Decoder(Cache)
    graph = penstock.capture(model, BATCH.args).graph
    assert graph.fingerprint == penstock.capture(Decoder(Cache), BATCH.args).graph.fingerprint


class Given:
    """An argument of a model."""

    def __init__(self, tensor):
        self.tensor, self.name = tensor, "given"


def mean(output, target):
    return output.mean()


@pytest.mark.parametrize("made", [Given, lambda tensor: Fields([tensor])])
def test_a_holder_among_the_inputs_is_taken_apart_and_split_into_microbatches(made):
    class Reading(nn.Sequential):
        def forward(self, given):
            return super().forward(given.tensor if isinstance(given, Given) else given.tensors[0])

    model, batch = Reading(*(Block() for _ in range(4))), BATCH.args[0]
    captured = penstock.capture(model, (made(batch),))
    run = StageSequence(captured, uniform(captured.graph, 2))
    assert torch.equal(run(made(-batch)), model(made(-batch)))
    assert captured.num_recordings == 1
    plan = quick_plan(model, (made(batch),), ranks=2, microbatches=2, loss_fn=mean)
    assert penstock.check(model, plan, (made(-batch),), loss_fn=mean).ok


class Counter:
    """Holds a number only."""

    def __init__(self):
        self.count = 0


class Counted(Block):
    """Goes by the number of blocks before it."""

    def forward(self, x, counter):
        counter.count += 1
        return super().forward(x) * counter.count


def test_an_object_without_tensors_that_blocks_change_is_new_in_every_replay():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Counted() for _ in range(4))

        def forward(self, x):
            counter = Counter()
            for block in self.blocks:
                x = block(x, counter)
            return x

    model = Counts()
    captured = penstock.capture(model, BATCH.args)
    for batch in (BATCH, BATCH.other()):
        assert_identical(staged(captured, 2, batch), whole(model, batch))


def test_an_object_that_a_module_holds_and_a_block_changes_is_refused():
    model = Decoder(Cache)
    held = model.held = Cache()
    model.make = lambda: held
    with pytest.raises(CaptureError, match=r"an object that a module of the model holds.*\n?.*blocks.0"):
        penstock.capture(model, BATCH.args)


def test_a_block_that_is_given_one_holder_twice_is_opened():
    class Twice(Remembering):
        def forward(self, x, holder, also):
            assert holder is also
            return super().forward(x, holder)

    class Doubled(Decoder):
        def forward(self, x):
            holder = self.make()
            for block in self.blocks:
                x = block(x, holder, also=holder)
            return x

    model = Doubled(Cache)
    model.blocks = nn.ModuleList(Twice(place) for place in range(4))
    captured = penstock.capture(model, BATCH.args)
    assert "blocks.0.linear" in {node.name for node in captured.graph.nodes}
    assert_close(staged(captured, 2), whole(model), 1e-6)


def test_a_holder_that_refers_to_itself_is_refused():
    def made():
        cache = Looped()
        cache.own = cache
        return cache

    class Looped(Cache):
        pass

    with pytest.raises(CaptureError, match="an object that holds tensors is passed from one block"):
        penstock.capture(Decoder(made), BATCH.args)


@pytest.mark.parametrize("kind", ["an object", "a list", "a dataclass"])
def test_the_generated_file_makes_and_reads_the_holder(kind, tmp_path):
    model = Decoder(KINDS[kind])
    captured = penstock.capture(model, BATCH.args)
    module = generated(captured, 2, tmp_path)
    assert_identical(step_of_file(module, model, BATCH), whole(model))


def test_an_argument_may_have_the_name_of_the_submodule_that_receives_it():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.source, self.head = Block(), Block()

        def forward(self, source):
            return self.head(self.source(source)) + source

    model = Named()
    captured = penstock.capture(model, BATCH.args)
    assert_identical(staged(captured, 2, BATCH.other()), whole(model, BATCH.other()))
