"""plan --emit: lists of modules and an order that other tools read, and that train when they are fed back."""

import csv
import json
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining.schedules import _Action, _validate_schedule

from penstock import AutoPipeline, AutoPipelineConfig
from tests.auto.models import LENGTH, SAMPLES, alone, batches, decoder, mean_loss, piped

FILE = """\
import torch
from torch import nn

class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(9, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
        self.norm, self.output = nn.LayerNorm(4), nn.Linear(4, 9)

    def forward(self, ids):
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.output(self.norm(x))

class Tied(Decoder):
    def __init__(self):
        super().__init__()
        self.output.weight = self.tok_embeddings.weight

class Skip(Decoder):
    def forward(self, ids):
        first = self.tok_embeddings(ids)
        x = self.layers[0](first)
        return self.output(self.layers[2](self.layers[1](x)) + first)

class Own(Decoder):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, ids):
        return super().forward(ids) * self.scale.sum()

def build(): return Decoder(), torch.zeros(8, 3, dtype=torch.int64)
def tied(): return Tied(), torch.zeros(8, 3, dtype=torch.int64)
def skip(): return Skip(), torch.zeros(8, 3, dtype=torch.int64)
def own(): return Own(), torch.zeros(8, 3, dtype=torch.int64)
"""
QUICK = ("--ranks", "2", "--microbatches", "4", "--budget", "0.1", "--partitioner", "linear")
QUICK += ("--flops", "1e12", "--memory-speed", "1e11")  # estimated, not timed
REFUSALS = {
    "tied": ("1f1b", 3, "a tied parameter is in two stages (names: ('tok_embeddings.weight', 'output.weight')"),
    "skip": ("zbv", 3, "a value skips a stage"),
    "own": ("1f1b", 3, "in no module that a list could name (parameter: scale)"),
}


@pytest.fixture(autouse=True)
def _file(written: Callable[[str, str], Path], tmp_path: Path) -> None:
    written("model.py", FILE)
    (tmp_path / "tiny").mkdir()
    written("tiny/config.json", json.dumps({**decoder().config.to_dict(), "dtype": "float32"}))


def rows(text: str) -> list[list[str]]:
    return list(csv.reader(text.splitlines()))


def test_torchtitan_gets_its_table_and_an_order_that_torch_accepts(call) -> None:
    result = call("plan", "model.py:build", *QUICK, "--schedule", "zbv", "--emit", "torchtitan")
    config, _, order = result.stdout.partition("\n# schedule.csv\n")
    found = tomllib.loads(config)
    assert found["training"] == {"local_batch_size": 8}
    parallelism = found["parallelism"]
    lists = parallelism["module_fqns_per_model_part"]
    assert len(lists) == 4
    names = [name for names in lists for name in names]
    assert names == ["tok_embeddings", *(f"layers.{layer}" for layer in range(5)), "norm", "output"]
    assert parallelism["pipeline_parallel_degree"] == 2
    assert parallelism["pipeline_parallel_schedule"] == "ZBVZeroBubble"
    assert parallelism["pipeline_parallel_microbatch_size"] == 2
    actions = {rank: [_Action.from_str(cell) for cell in row] for rank, row in enumerate(rows(order))}
    assert _validate_schedule(actions, 2, 4, 4) == {0: 0, 1: 1, 2: 1, 3: 0}


def test_programs_get_lists_order_and_configuration(call) -> None:
    result = call("plan", "model.py:build", *QUICK, "--schedule", "1f1b", "--emit", "automodel", "--json")
    found = json.loads(result.stdout)
    inside = yaml.safe_load(found["config"])["distributed"]
    assert inside["pp_size"] == 2
    assert inside["pipeline"]["pp_schedule"] == "1F1B"
    assert inside["pipeline"]["module_fqns_per_model_part"] == found["module_fqns_per_model_part"]
    assert len(rows(found["schedule_csv"])) == 2


@pytest.mark.parametrize("function", REFUSALS)
def test_plans_that_another_tool_cannot_run_are_refused(function: str, call) -> None:
    schedule, code, words = REFUSALS[function]
    result = call("plan", f"model.py:{function}", *QUICK, "--schedule", schedule, "--emit", "automodel")
    assert result.exit_code == code
    assert words in result.stderr
    assert "\ntry: " in result.stderr


def test_torchtitan_gets_no_modules_inside_others(call) -> None:
    sizes = ("--batch", "4", "--sequence", "7")
    result = call("plan", "hf:tiny", *QUICK, *sizes, "--schedule", "1f1b", "--emit", "torchtitan")
    assert "between its own children only (module: model.embed_tokens)" in result.stderr
    assert "try: --emit automodel" in result.stderr
    assert result.exit_code == 3


def emitted_job(settings):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    ap = AutoPipeline(AutoPipelineConfig(world_mesh=mesh, **settings)).build(decoder(), loss_fn=mean_loss)
    return piped(ap, batches(3))


@pytest.mark.gloo
@pytest.mark.parametrize("schedule", [pytest.param("interleaved", marks=pytest.mark.whole), "zbv"])
def test_emitted_settings_train_like_the_unsplit_model(schedule: str, call, pools, tmp_path: Path) -> None:
    sizes = ("--batch", str(SAMPLES), "--sequence", str(LENGTH))
    typed = ("plan", "hf:tiny", *QUICK, *sizes, "--schedule", schedule, "--emit", "automodel", "--out", "pp.yaml")
    result = call(*typed)
    assert "wrote pp.yaml and pp.csv" in result.stderr
    settings = yaml.safe_load((tmp_path / "pp.yaml").read_text())["distributed"]["pipeline"]
    assert settings.pop("pp_schedule")  # which those tools want for the placement, and here the CSV says
    settings["pp_schedule"], settings["pp_schedule_csv"] = None, str(tmp_path / settings["pp_schedule_csv"])
    for losses in pools[2].run(emitted_job, settings):
        assert losses == pytest.approx(alone(decoder(), batches(3)), rel=1e-12)
