"""pipe_model: a model recorded, measured and cut in one call, by every method."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import PartitionError
from penstock.ir import DeviceSpeed
from penstock.partitioners import find

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
    piped = penstock.pipe_model(net(), BATCH, ranks=3, method="pipedream", speed=SPEED)
    assert piped.stage_of("blocks.0") == 0
    assert piped.stage_of("head") == 2
    assert "forward_time" in str(piped)
    assert [line.split("|")[1].strip() for line in str(piped).splitlines()[-3:]] == ["0", "1", "2"]


def test_several_stages_of_a_mixed_pipe_may_share_a_rank() -> None:
    torch.manual_seed(0)
    wide = [nn.Linear(64, 64) for _ in range(8)]
    model = nn.Sequential(*wide, nn.Linear(64, 16), *[nn.Linear(16, 16) for _ in range(8)])
    piped = penstock.pipe_model(model, torch.randn(4, 64), ranks=4, method="mpipe", speed=SPEED)
    runs = penstock.pipe_model(model, torch.randn(4, 64), ranks=4, method="pipedream", speed=SPEED)
    assert len(piped.stages) > 4
    assert piped.division.bottleneck_seconds < runs.division.bottleneck_seconds


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
