"""A stage is a module with the model's own parts and names."""

import copy

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import PartitionError
from penstock.ir import Partition
from penstock.partitioners import by_modules, uniform
from penstock.stages import LayerList, StageSequence
from tests.capture.models import Parametric, Stack
from tests.parity import Batch, StagedModel, WholeModel, assert_close, one_step

BATCH = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def stages_of(model, number=3, **options):
    captured = penstock.capture(model, (BATCH,), **options)
    return penstock.split(captured, uniform(captured.graph, number))


@pytest.mark.parametrize("kind", [Stack, Parametric])
def test_the_union_of_all_stages_is_the_model_each_parameter_once(kind):
    model = kind()
    names = [name for stage in stages_of(model) for name in stage.state_dict()]
    assert sorted(names) == sorted(model.state_dict())


@pytest.mark.parametrize("depth", [None, 9])
def test_a_stage_holds_the_models_own_parameters(depth):
    model = Stack()
    whole = dict(model.named_parameters())
    for stage in stages_of(model, depth=depth):
        for name, parameter in stage.named_parameters():
            assert parameter is whole[name]


@pytest.mark.parametrize("name", ["_blocks", "blocks", "stages"])
def test_the_blocks_of_a_model_may_be_in_a_list_of_any_usual_name(name):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module(name, nn.ModuleList(nn.Linear(4, 4) for _ in range(4)))

        def forward(self, x):
            for layer in getattr(self, name):
                x = layer(x)
            return x

    model = Named()
    assert sorted(key for stage in stages_of(model, 2) for key in stage.state_dict()) == sorted(model.state_dict())


def test_a_tied_parameter_is_in_the_stage_of_each_of_its_names():
    model = Stack()
    tied = model.blocks[3].linear.weight = model.blocks[0].linear.weight
    named = [name for stage in stages_of(model) for name, parameter in stage.named_parameters() if parameter is tied]
    assert named == ["blocks.0.linear.weight", "blocks.3.linear.weight"]


def test_a_stage_can_be_set_to_evaluation_and_moved_to_another_type():
    model = Stack().double()
    captured = penstock.capture(model, (BATCH.double(),))
    run = StageSequence(captured, uniform(captured.graph, 3))
    for stage in run.stages:
        stage.eval()
    assert not model.norm.training
    assert torch.equal(run(BATCH.double()), model.eval()(BATCH.double()))


def test_hooks_on_blocks_fire_once_for_every_forward():
    model, seen = Stack(), []
    captured = penstock.capture(model, (BATCH,))
    run = StageSequence(captured, uniform(captured.graph, 3))
    model.blocks[1].register_forward_hook(lambda *_: seen.append("block"))
    run(BATCH)
    assert seen == ["block"]


def test_other_batch_sizes_work_and_equal_the_model():
    model = Stack().eval()
    captured = penstock.capture(model, (BATCH,))
    run = StageSequence(captured, uniform(captured.graph, 3))
    for size in (2, 5):
        assert torch.equal(run(BATCH[:size]), model(BATCH[:size]))
    assert captured.num_recordings == 3


def test_input_and_weight_gradients_can_be_taken_apart():
    model = Stack().double().eval()
    captured = penstock.capture(model, (BATCH.double(),))
    gradient = torch.ones(6, 3, dtype=torch.float64)
    found = []
    for is_split in (False, True):
        run = StageSequence(captured, uniform(captured.graph, 3), is_split)
        model.zero_grad()
        run(BATCH.double())
        run.backward({0: gradient})
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *found))


def test_the_check_finds_a_stage_that_differs():
    model = Stack().eval()
    captured = penstock.capture(model, (BATCH,))
    partition = uniform(captured.graph, 2)
    other = copy.deepcopy(model.head)
    with torch.no_grad():
        other.weight += 1
    captured.run_unsplit = lambda x: other(model.norm(torch.zeros(6, 8)) + model.embed(x))
    with pytest.raises(PartitionError, match=r"the stages differ from the model \(tensor: output 0"):
        penstock.split(captured, partition)


def test_the_check_can_be_switched_off():
    model = Stack()
    captured = penstock.capture(model, (BATCH,))
    captured.run_unsplit = None
    assert len(penstock.split(captured, uniform(captured.graph, 2), check=False)) == 2


def test_the_check_leaves_gradients_as_they_were():
    model = Stack()
    model(BATCH).sum().backward()
    before = [parameter.grad for parameter in model.parameters()]
    stages_of(model)
    assert all(a is b.grad for a, b in zip(before, model.parameters(), strict=True))


def test_a_model_without_weights_is_split_and_given_weights_later():
    real = Stack().eval()
    with torch.device("meta"):
        empty = Stack().eval()
    captured = penstock.capture(empty, (BATCH,))
    run = StageSequence(captured, uniform(captured.graph, 3))
    for stage in run.stages:
        stage.to_empty(device="cpu")
        stage.load_state_dict({name: real.state_dict()[name] for name in stage.state_dict()})
    assert torch.equal(run(BATCH), real(BATCH))


def test_a_flat_list_of_names_modules_and_functions_is_a_model():
    model = nn.Sequential(nn.Linear(4, 4), nn.ModuleList([nn.ReLU(), nn.Linear(4, 6)]), nn.Linear(3, 2))
    flat = LayerList(model, ["0", "1", lambda x: x.view(-1, 3), model[2]])
    assert flat.names == ("0", "1.0", "1.1", "2")
    assert sorted(flat.state_dict()) == sorted(model.state_dict())
    captured = penstock.capture(flat, (BATCH,))
    run = StageSequence(captured, by_modules(captured.graph, [["0", "1.0"], ["1.1", "2"]]))
    assert torch.equal(run(BATCH), flat(BATCH))


def test_a_flat_list_takes_a_model_whose_blocks_are_named_layers():
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4), nn.ReLU()])})
    flat = LayerList(model, ["layers"])
    assert flat.names == ("layers.0", "layers.1")
    assert torch.equal(flat(torch.ones(2, 4)), model["layers"][0](torch.ones(2, 4)).relu())


def test_an_unknown_name_in_a_flat_list_is_refused():
    with pytest.raises(PartitionError, match=r"no such module \(name: 'hed'\)\ntry: did you mean 'head'"):
        LayerList(Stack(), ["embed", "hed"])


class Scaled(nn.Module):
    """Uses a parameter between its blocks, and one more function for long batches."""

    def __init__(self):
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.ones(8)), nn.Linear(8, 8)

    def forward(self, x):
        x = x * self.scale[None].expand_as(x)
        return self.inner(x.tanh() if len(x) > 4 else x)


class CalledTwice(nn.Module):
    """One encoder for two inputs: its parameters are used in both stages."""

    def __init__(self):
        super().__init__()
        self.encoder, self.head = Scaled(), nn.Linear(8, 1)

    def forward(self, x, y):
        return self.head(self.encoder(y) + self.encoder(x).relu())


@pytest.mark.parametrize("size", [4, 6])
def test_a_batch_with_other_calls_uses_a_parameter_in_the_stages_that_have_it(size):
    model = CalledTwice()
    batch = Batch((torch.randn(size, 8), torch.randn(size, 8)), {}, False)
    captured = penstock.capture(model, (torch.randn(4, 8), torch.randn(4, 8)))
    names = [node.name for node in captured.graph.nodes]
    cut = names.index("encoder.inner") + 1
    staged = StagedModel(captured, Partition((tuple(names[:cut]), tuple(names[cut:]))), batch.loss_fn)
    assert_close(one_step(staged, batch), one_step(WholeModel(model, batch.loss_fn), batch), 1e-6)
