"""pipe_model: a model recorded, measured and cut in one call, by every method."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import PartitionError, PlanError
from penstock.ir import DeviceSpeed, Placement
from penstock.partitioners import PARTITIONERS, find
from tests import parity

BATCH = torch.randn(4, 16)
SPEED = DeviceSpeed(1e9, 1e9)
HAS_METIS = find("metis").is_available()
METHODS = [
    pytest.param("metis", marks=pytest.mark.skipif(not HAS_METIS, reason="the extra metis is not installed")),
    "mpipe",
    "acyclic",
    "pipedream",
]


class Block(nn.Module):
    """Two layers beside a shortcut."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.first(x)))


class Net(nn.Module):
    """Blocks in a list, and a head that reads the first value again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        first = x
        for block in self.blocks:
            x = block(x)
        return self.head(x + first)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("method", METHODS)
def test_every_method_cuts_the_model_and_writes_a_file_that_runs_like_it(method: str, tmp_path: Path) -> None:
    model = net()
    piped = penstock.pipe_model(model, (BATCH,), ranks=3, method=method, speed=SPEED)
    assert sorted(name for stage in piped.stages for name in stage) == sorted(node.name for node in piped.nodes)
    assert piped.placement.num_ranks == 3
    file = imported(piped.generate_code(tmp_path / "stages.py"))
    assert torch.equal(file.run(model, BATCH), model(BATCH))
    assert piped.placement.ranks == file.PLACEMENT
    assert len(piped.split()) == len(piped.stages)


def test_metrics_go_by_their_usual_names() -> None:
    piped = penstock.pipe_model(net(), BATCH, ranks=2, method="pipedream", iterations=1)
    block = piped.metrics["blocks.0"]
    assert block.forward_time > 0
    assert block.backward_time > 0
    assert block.size == pytest.approx(2 * (16 * 16 + 16) * 4 / 1e6)
    assert block.input_size == block.output_size == pytest.approx(4 * 16 * 4 / 1e6)
    assert block.cuda_memory_forward > 0
    assert block.cuda_memory_backward > 0


def test_depth_opens_modules_and_basic_blocks_stay_whole() -> None:
    def names(**options: object) -> set[str]:
        return {node.name for node in penstock.pipe_model(net(), BATCH, ranks=2, speed=SPEED, **options).nodes}

    assert "blocks.0" in names()
    opened = names(depth=2)
    assert {"blocks.0.first", "blocks.5.second"} <= opened
    assert "blocks.0" not in opened
    kept = names(depth=3, basic_blocks=[Block])
    assert "blocks.0" in kept
    assert "blocks.0.first" not in kept


def test_a_node_is_found_in_its_stage_and_the_table_names_every_stage() -> None:
    piped = penstock.pipe_model(net(), BATCH, ranks=3, method="acyclic", speed=SPEED)
    assert piped.stage_of("blocks.0") == 0
    assert piped.stage_of("head") == 2
    assert "forward_time" in str(piped)
    assert [line.split("|")[1].strip() for line in str(piped).splitlines()[-3:]] == ["0", "1", "2"]


def uneven() -> nn.Sequential:
    """Blocks of very different cost: no cut into two runs is even."""
    torch.manual_seed(0)
    widths = (16, 64, 8, 128, 128, 16, 8)
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, n), nn.Tanh(), nn.Linear(n, 8)) for n in widths]).double()


def uneven_batch() -> Tensor:
    return torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def pipe_uneven(method: str = "mpipe") -> penstock.PartitionedGraph:
    loss_fn = nn.functional.mse_loss
    return penstock.pipe_model(uneven(), uneven_batch(), ranks=2, method=method, speed=SPEED, loss_fn=loss_fn)


@pytest.mark.parametrize("method", [name for name, each in PARTITIONERS.items() if each.is_available()])
def test_stages_that_are_not_neighbours_share_a_rank_except_in_acyclic(method: str) -> None:
    piped = pipe_uneven(method)
    assert (len(piped.stages) > 2) == (method != "acyclic")
    runs = pipe_uneven("acyclic").division.bottleneck_seconds
    assert piped.division.bottleneck_seconds < runs or method == "acyclic"


def trained_graph(execution: str) -> list[parity.Values]:
    """Two steps of the stages that mpipe chose, on five stages for two ranks."""
    model, piped = uneven(), pipe_uneven()
    plan = piped.plan(microbatches=3, budget_seconds=0.0)
    assert plan.schedule.placement == piped.placement == Placement((0, 1, 0, 1, 0))
    assert plan.partition == piped.partition
    pipe = parity.split(execution, model, plan, nn.functional.mse_loss)
    return [parity.train(pipe, [(uneven_batch(), uneven_batch().flip(0))] * 2)]


@pytest.mark.parametrize("execution", parity.PIPELINES, indirect=True)
def test_a_partitioned_graph_trains_like_the_model(execution: parity.Execution) -> None:
    whole = parity.WholeModel(uneven(), nn.functional.mse_loss)
    expected = parity.train(whole, [(uneven_batch(), uneven_batch().flip(0))] * 2)
    (found,) = execution.run(trained_graph, 2)
    parity.assert_close(found, expected)


def test_a_plan_with_mpipe_has_the_placement_that_mpipe_chooses() -> None:
    options = {"loss_fn": nn.functional.mse_loss, "speed": SPEED, "budget_seconds": 0.0}
    plan = penstock.plan(uneven(), (uneven_batch(),), ranks=2, microbatches=3, partitioner="mpipe", **options)
    assert plan.schedule.placement == Placement((0, 1, 0, 1, 0))
    assert plan.choices.partitioner == "mpipe"


@pytest.mark.parametrize("options", [{"ranks": 3}, {"schedule": "1f1b"}, {"stages_per_rank": 2}])
def test_options_that_contradict_the_placement_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="must be those of the given placement"):
        pipe_uneven().plan(microbatches=3, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ranks": 0}, "ranks must be a whole number, 1 or more"),
        ({"ranks": 2, "method": "metsi"}, "did you mean metis"),
    ],
)
def test_a_wrong_choice_is_refused_before_anything_is_measured(options: dict[str, object], words: str) -> None:
    with pytest.raises(PartitionError, match=words):
        penstock.pipe_model(net(), BATCH, **options)


def test_a_node_that_is_not_there_is_refused() -> None:
    piped = penstock.pipe_model(net(), BATCH, ranks=2, speed=SPEED)
    with pytest.raises(PartitionError, match="no such node"):
        piped.stage_of("blocks.9")
