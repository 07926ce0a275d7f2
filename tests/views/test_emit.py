"""Plans as configurations of other frameworks, and the plans that these cannot run."""

import json
import re
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import PartitionError, PlanError
from penstock.ir import DeviceSpeed, Partition, Plan
from penstock.views import EMITTERS, check_can_run, module_lists

torchtitan, automodel = EMITTERS["torchtitan"], EMITTERS["automodel"]


class Net(nn.Module):
    """A list of layers whose parts are visible when it is opened, and glue behind the head."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(4, 4)
        if tied:
            self.head.weight = self.layers[0][0].weight

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x).exp().square()


class Skip(Net):
    """The first layer feeds the head directly."""

    def forward(self, x):
        first = self.layers[0](x)
        return self.head(self.layers[3](self.layers[2](self.layers[1](first))) + first)


class Own(Net):
    """A parameter that is in no module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return super().forward(x) * self.scale


def planned(model: nn.Module, schedule: str, ranks: int = 2) -> Plan:
    options = {"schedule": schedule, "partitioner": "uniform", "speed": DeviceSpeed(1e12, 1e11)}
    return penstock.plan(model, (torch.ones(6, 4),), ranks=ranks, microbatches=3, **options)


@cache
def plan(schedule: str = "1f1b") -> Plan:
    return planned(Net(), schedule)


def cut(*stages: tuple[str, ...]) -> Plan:
    """The plan of a model that was opened, cut as given."""
    graph = penstock.capture(Net(), (torch.ones(2, 4),), depth=2).graph
    names = [node.name for node in graph.nodes]
    cuts = [0, *(names.index(first) for first, *_ in stages), len(names)]
    partition = Partition(tuple(tuple(names[a:b]) for a, b in pairwise(cuts)))
    return replace(plan(), graph=graph, partition=partition)


def test_every_stage_is_its_modules_in_order() -> None:
    lists = module_lists(plan())
    assert [name for names in lists for name in names] == ["layers.0", "layers.1", "layers.2", "layers.3", "head"]
    assert len(lists) == 2


def test_parts_of_a_layer_have_the_name_of_the_layer() -> None:
    assert module_lists(cut(("layers.2.0",))) == [["layers.0", "layers.1"], ["layers.2", "layers.3", "head"]]


def test_a_stage_of_functions_only_gets_the_nearest_module() -> None:
    found = cut(("/exp",))
    assert module_lists(found) == [["layers.0", "layers.1", "layers.2", "layers.3"], ["head"]]


def test_a_cut_inside_a_layer_is_refused() -> None:
    with pytest.raises(PartitionError, match=r"a cut must not be inside a module.*module: layers.1, stages: \(0, 1\)"):
        module_lists(cut(("layers.1.1",)))


def test_fewer_modules_than_stages_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    graph = penstock.capture(nn.ModuleList([model])[0], (torch.ones(2, 4),)).graph
    found = replace(plan())
    object.__setattr__(found, "graph", graph)
    object.__setattr__(found, "partition", Partition((tuple(node.name for node in graph.nodes), ("nothing",))))
    with pytest.raises(PartitionError, match="every stage must have a module to name"):
        module_lists(found)


@pytest.mark.parametrize(
    ("schedule", "name"),
    [("1f1b", "1F1B"), ("gpipe", "1F1B"), ("interleaved", "Interleaved1F1B"), ("zbv", "ZBVZeroBubble")],
)
def test_the_name_gives_the_placement(schedule: str, name: str) -> None:
    assert f"pp_schedule: {name}\n" in automodel(plan(schedule), "s.csv")


def test_stages_in_neither_loop_nor_vee_are_refused() -> None:
    own = penstock.Schedule.from_csv("1F0,1F1,1F2,1B0,1B1,1B2\n0F0,0B0,0F1,0B1,0F2,0B2\n")
    with pytest.raises(PlanError, match="must be a loop or a vee"):
        torchtitan(replace(plan(), schedule=own), "s.csv")


@pytest.mark.parametrize(
    ("chosen", "words"), [((True, True), 'mode = "full"'), ((False, False), "local_batch_size = 6")]
)
def test_all_stages_or_none_are_recomputed(chosen: tuple[bool, ...], words: str) -> None:
    found = replace(plan(), choices=replace(plan().choices, recompute=chosen))
    assert words in torchtitan(found, "s.csv")
    assert f"activation_checkpointing: {str(chosen[0]).lower()}\n" in automodel(found, "s.csv")


def test_recomputation_of_some_stages_is_refused() -> None:
    with pytest.raises(PlanError, match="must apply to all stages or to none"):
        automodel(replace(plan(), choices=replace(plan().choices, recompute=(True, False))), "s.csv")


def test_a_chain_can_run() -> None:
    check_can_run(plan("zbv"))


@pytest.mark.parametrize(
    ("model", "ranks", "words"),
    [
        (Net(tied=True), 2, "a tied parameter is in two stages"),
        (Skip(), 3, "a value skips a stage"),
    ],
)
def test_plans_that_torch_cannot_run_are_refused(model: nn.Module, ranks: int, words: str) -> None:
    with pytest.raises(PartitionError, match=words):
        check_can_run(planned(model, "1f1b", ranks))


def test_a_parameter_outside_of_modules_is_refused() -> None:
    with pytest.raises(PartitionError, match=r"in no module that a list could name \(parameter: scale\)"):
        module_lists(planned(Own(), "1f1b"))


class Outer(nn.Module):
    """A model inside another, as Hugging Face has them."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Net()

    def forward(self, x):
        return self.model(x)


def test_torchtitan_cannot_split_modules_inside_others() -> None:
    with pytest.raises(PartitionError, match=r"between its own children only \(module: model.layers.0"):
        torchtitan(planned(Outer(), "1f1b"), "s.csv")


def layout_of(text: str) -> list[list[str]]:
    """The stages of a layout, read as megatron-core documents it: E, t, L, `x*n` and stages between `|`."""
    return [list(re.sub(r"(.)\*(\d+)", lambda found: found[1] * int(found[2]), stage)) for stage in text.split("|")]


def megatron_layout(config: str) -> str:
    return re.search(r'--pipeline-model-parallel-layout "([^"]+)"', config)[1]


@pytest.mark.parametrize(("schedule", "order"), [("1f1b", "1F1B"), ("interleaved", "interleaved 1F1B")])
def test_megatron_gets_the_layers_of_every_stage(schedule: str, order: str) -> None:
    config = EMITTERS["megatron"](plan(schedule), "order.csv")
    layers = layout_of(megatron_layout(config))
    expected = [sum(name.startswith("layers.") for name in names) for names in module_lists(plan(schedule))]
    assert [stage.count("t") for stage in layers] == expected
    assert layers[0][0] == "E"
    assert layers[-1][-1] == "L"
    assert config.startswith(f"# Megatron runs {order}; the planned order is in order.csv\n--num-layers 4\n")
    assert "--micro-batch-size 2\n--global-batch-size 6\n" in config


def test_megatron_reads_the_layout_itself() -> None:
    layouts = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    layout = layouts.PipelineParallelLayerLayout(megatron_layout(EMITTERS["megatron"](plan(), "order.csv")), 2)
    layout.validate_layer_layout(4, None)


def test_megatron_places_stages_in_a_loop() -> None:
    with pytest.raises(PlanError, match="the placement must be a loop"):
        EMITTERS["megatron"](plan("zbv"), "order.csv")


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))),
        nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))),
    ],
    ids=["at the top", "two lists"],
)
def test_megatron_needs_one_list_of_layers(model: nn.Module) -> None:
    with pytest.raises(PartitionError, match="all layers must be in one list"):
        EMITTERS["megatron"](planned(model, "1f1b"), "order.csv")


def test_one_stage_has_all_layers() -> None:
    whole = planned(Net(), "1f1b", ranks=1)
    assert megatron_layout(EMITTERS["megatron"](whole, "")) == "Et*4L"
    assert json.loads(EMITTERS["deepspeed"](whole, ""))["pipeline"]["parts"] == [0, 5]
    assert "pipeline_parallel_degree = 1" in torchtitan(whole, "")


def test_megatron_and_deepspeed_recompute_everything_or_nothing() -> None:
    whole = replace(plan(), choices=replace(plan().choices, recompute=(True, True)))
    assert "--recompute-granularity full" in EMITTERS["megatron"](whole, "")
    assert '"activation_checkpoint_interval": 1' in EMITTERS["deepspeed"](whole, "")


def test_deepspeed_gets_the_boundaries_of_the_stages() -> None:
    pipeline = json.loads(EMITTERS["deepspeed"](plan(), "order.csv"))["pipeline"]
    assert [pipeline["layers"][a:b] for a, b in pairwise(pipeline["parts"])] == module_lists(plan())
    with pytest.raises(PlanError, match="every rank must have one stage"):
        EMITTERS["deepspeed"](plan("interleaved"), "order.csv")


def test_only_some_frameworks_tie_weights() -> None:
    tied = planned(Net(tied=True), "1f1b")
    check_can_run(tied, ties_weights=True)
    with pytest.raises(PartitionError, match="tied parameter"):
        check_can_run(tied)
