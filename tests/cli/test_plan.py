"""plan and explain: the best plan of a model from a file of the user's, and why it is the best."""

import json
import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest

import penstock
from penstock import Plan
from penstock.cli.plan import Machine, PlanFlags, StateFlags
from penstock.errors import PlanError
from penstock.ir import DeviceSpeed, Prediction, TrainingState, from_json
from penstock.planner import PlanOptions
from tests.plans import chain_plan

FILE = """\
import torch
from torch import nn

def build():
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]), torch.ones(8, 4)

def misfit():
    return nn.Linear(4, 4), torch.ones(8, 5)

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 4), nn.Linear(4, 10)

    def forward(self, words, labels):
        return nn.functional.cross_entropy(self.head(self.embedding(words)).flatten(0, 1), labels.flatten())

def words():
    words = torch.zeros(8, 3, dtype=torch.long)
    return Words(), (words, words)
"""
QUICK = ("--ranks", "2", "--budget", "0.1")


@pytest.fixture(autouse=True)
def _file(written: Callable[[str, str], Path]) -> None:
    written("model.py", FILE)


def test_a_plan_is_shown_written_and_explained(call, tmp_path: Path) -> None:
    shown = call("plan", "model.py:build", *QUICK, "--microbatches", "4", "--out", "plan.json")
    assert shown.exit_code == 0
    assert "on 2 ranks" in shown.stdout
    assert "has the most work" in shown.stdout
    assert "wrote plan.json" in shown.stderr
    assert Plan.load(tmp_path / "plan.json").num_microbatches == 4
    assert call("explain", "plan.json").stdout == shown.stdout


def test_a_plan_is_printed_for_programs(call) -> None:
    text = call("plan", "model.py:build", *QUICK, "--schedule", "1f1b", "--json").stdout
    assert from_json(text, Plan).choices.schedule == "1f1b"


def test_reasons_are_printed_for_programs(call) -> None:
    call("plan", "model.py:build", *QUICK, "--schedule", "1f1b", "--microbatches", "2", "--out", "plan.json")
    found = json.loads(call("explain", "plan.json", "--json").stdout)
    assert found["options"]["schedule"] == "1f1b"
    assert found["lower_bound_seconds"] > 0
    assert found["reasons"]


def test_the_output_layer_is_split(call, tmp_path: Path) -> None:
    words = ("plan", "model.py:words", *QUICK, "--microbatches", "4", "--vocabulary-shards")
    shown = call(*words, "3", "--out", "plan.json")
    assert "The output layer head is split into 3 shards." in shown.stdout
    assert Plan.load(tmp_path / "plan.json").partition.stage_of("head.shards.2") >= 0
    assert "matches the unsplit model" in call("check", "plan.json", "--model", "model.py:words").stdout
    for value, text in (("two", "must be a whole number or auto (got: 'two')"), ("1", "2 or more (got: 1)")):
        refused = call(*words, value)
        assert refused.exit_code == 2
        assert text in refused.stderr
    refused = call(*words, "2", "--emit", "megatron")
    assert refused.exit_code == 2
    assert "megatron cannot split the output layer over stages" in refused.stderr


def test_a_model_is_planned_to_be_explained(call) -> None:
    options = ("--schedule", "1f1b", "--microbatches", "2")
    assert "has the most work" in call("explain", "model.py:build", *QUICK, *options).stdout


def test_a_batch_that_does_not_fit_the_model_is_refused(call) -> None:
    result = call("plan", "model.py:misfit", *QUICK)
    assert result.exit_code == 3
    assert "cannot be run on this batch" in result.stderr


def test_a_slow_rank_is_planned_for(call) -> None:
    text = call("plan", "model.py:build", *QUICK, "--microbatches", "2", "--slowness", "1,2.5", "--json").stdout
    assert from_json(text, Plan).cluster.slowness == (1.0, 2.5)


@pytest.mark.parametrize("given", ["1,two", "1,2,3", "1,-2"])
def test_slowness_that_makes_no_sense_is_wrong_usage(call, given: str) -> None:
    result = call("plan", "model.py:build", *QUICK, "--slowness", given)
    assert result.exit_code == 2
    assert "--slowness" in result.stderr


def test_ranks_share_the_cores_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 5}, raising=False)
    assert Machine.here(4).cluster(4).cores == 2
    assert Machine.here(2).cluster(2).cores is None


def test_the_options_of_the_command_are_the_fields_of_plan_options() -> None:
    """The command line cannot import the record, which needs numpy, without slowing down --help."""
    flags = {{"budget": "budget_seconds"}.get(field.name, field.name): field.default for field in fields(PlanFlags)}
    of_capture = {"depth": None, "block": None, "vocabulary_shards": None}
    of_state = ("training", "shard_optimizer")
    in_python = {field.name: field.default for field in fields(PlanOptions) if field.name not in of_state}
    assert flags == in_python | of_capture
    # The number of shards is that of the replicas.
    names = {"optimizer_shards": "shard_optimizer"}
    of_training = [names.get(field.name, field.name) for field in fields(TrainingState)]
    assert [field.name for field in fields(StateFlags)] == of_training


def test_an_own_order_is_explained_beside_the_named_schedules(call, tmp_path: Path) -> None:
    slow = "0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n"
    plan = chain_plan("1f1b", 2, 1, 2)
    own = penstock.Schedule.from_csv(slow)
    trace = penstock.simulate(penstock.lower(own, cuts=plan.cuts), plan.costs, plan.cluster)
    predicted = Prediction.of(trace, plan.lower_bound)
    replace(plan, schedule=own, choices=replace(plan.choices, schedule="given"), predicted=predicted).save(
        tmp_path / "own.json"
    )
    output = call("explain", "own.json").output
    [row] = [line for line in output.splitlines() if line.strip().startswith("1f1b ")]
    assert row.endswith("shorter")
    others = json.loads(call("explain", "own.json", "--json").stdout)["other_schedules"]
    assert others["1f1b"] == pytest.approx(plan.predicted.makespan)
    assert list(others.values()) == sorted(others.values())
    plan.save(tmp_path / "named.json")
    assert "Named schedules" not in call("explain", "named.json").output


def test_a_device_has_memory_and_links() -> None:
    cluster = Machine(device="a100").cluster(16)
    assert cluster.limits == (80 * 2**30,) * 16
    assert cluster.link(0, 1).bandwidth > 5 * cluster.link(7, 8).bandwidth
    assert Machine(device="a100").speed == DeviceSpeed.named("a100")
    assert Machine(device="l4", bandwidth=1e9).cluster(2).bandwidth == 1e9
    assert Machine(link="pcie").cluster(2).limits == ()


@pytest.mark.parametrize(
    ("machine", "text"),
    [
        (Machine(device="a100", flops=1e12), "must not be given with --device"),
        (Machine(across="400G"), "--across needs the link"),
        (Machine(link="nvlink", bandwidth=1e9), "must not be given with --link"),
    ],
)
def test_contradictory_machines(machine: Machine, text: str) -> None:
    with pytest.raises(PlanError, match=text):
        machine.cluster(2), machine.speed


def test_the_optimizer_of_a_training_counts() -> None:
    assert StateFlags.of_training("SGD").optimizer == "sgd"
    assert StateFlags.of_training("file.py:make").optimizer == "adamw"
    assert [StateFlags(precision=name).dtype for name in (None, "fp32", "bf16", "fp16")] == [
        *(None, "float32", "bfloat16", "float16")
    ]


def test_a_layout_of_devices_has_its_utilization_and_the_others_with_their_reasons(call, written) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 64}
    written("config.json", json.dumps(config))
    devices = ("--devices", "8", "--device", "h100", "--global-batch", "16", "--tensor-parallel", "2")
    devices += ("--sequence-parallel", "--shard-optimizer")
    model = ("plan", "hf:config.json", *devices, "--sequence", "16", "--precision", "bf16", "--budget", "0.1")
    shown = call(*model, "--out", "plan.json").stdout
    assert re.search(r"8 devices as \d replicas? x \d pipeline ranks? x 2 tensor-parallel, .* MFU \d", shown)
    plan = Plan.load("plan.json")
    assert {each.tensor_parallel for each in plan.search.layouts} == {2}
    assert plan.training.optimizer_shards == plan.search.layouts[0].replicas
    assert all(each.lost for each in plan.search.layouts[1:])
    assert plan.search.layouts[0].mfu > 0
