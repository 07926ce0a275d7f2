"""check: orders from a file, proven."""

import json
from pathlib import Path

import pytest

from penstock import lower, schedule, simulate
from penstock.ir import save_record
from penstock.schedules import SCHEDULES


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_proven_from_its_csv(name: str, call, written) -> None:
    result = call("check", written("orders.csv", schedule(name, 3, 5).to_csv()))
    assert result.output.startswith("proven\nSchedule: 3 ranks")
    assert result.exit_code == 0


def test_a_program_is_proven_from_its_csv(call, written) -> None:
    answer = json.loads(call("check", "--json", written("p.csv", lower(schedule("zbv", 2, 2)).to_csv())).stdout)
    assert answer["proven"]
    assert (answer["type"], answer["ranks"], answer["stages"], answer["microbatches"]) == ("Program", 2, 4, 2)


def test_the_program_inside_a_trace_is_proven(call, tmp_path: Path) -> None:
    save_record(simulate(schedule("1f1b", 2, 2)), tmp_path / "trace.json")
    assert "Program: 2 ranks" in call("check", "trace.json").output


def test_a_limit_of_what_is_in_flight_is_part_of_the_proof(call, written) -> None:
    file = written("gpipe.csv", schedule("gpipe", 2, 4).to_csv())
    assert call("check", file, "--in-flight", 4).exit_code == 0
    assert "more microbatches in flight than allowed" in call("check", file, "--in-flight", 3).output


FILE = """\
import torch
from torch import nn

class Coupled(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.other(self.one(x) * x.mean(0))

class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.weight * x.mean(0)

def build(): return nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]), torch.randn(8, 4)
def batches(): yield torch.randn(8, 4), torch.randn(8, 4)
def from_centre(y, target): return (y - y.mean(0) - target).square().mean()
def coupled(): return Coupled(), torch.randn(8, 4)
def complex_layers():
    return nn.Sequential(*[nn.Linear(4, 4, dtype=torch.cfloat) for _ in range(4)]), torch.randn(8, 4) + 0j
def mixing(): return nn.Sequential(nn.Linear(4, 4), Mixing(), nn.Linear(4, 4)), torch.randn(8, 4)
"""
PLANNED = (
    "--ranks",
    "2",
    "--microbatches",
    "4",
    "--schedule",
    "1f1b",
    "--partitioner",
    "uniform",
    "--out",
    "plan.json",
)


def test_a_plan_is_compared_with_the_unsplit_model(call, written) -> None:
    written("model.py", FILE)
    call("plan", "model.py:build", *PLANNED)
    result = call("check", "plan.json", "--model", "model.py:build")
    assert result.stdout.startswith("proven\n")
    assert "the pipeline matches the unsplit model" in result.stdout
    parity = json.loads(call("check", "plan.json", "--model", "model.py:build", "--json").stdout)["parity"]
    assert parity["equal"]
    assert parity["microbatches"]["identical"]
    assert parity["whole_batch"]["compared"] == 9


def test_complex_outputs_are_part_of_the_loss(call, written) -> None:
    written("model.py", FILE)
    call("plan", "model.py:complex_layers", *PLANNED)
    parity = json.loads(call("check", "plan.json", "--model", "model.py:complex_layers", "--json").stdout)["parity"]
    assert parity["equal"]
    assert parity["whole_batch"]["compared"] == 9


def test_a_plan_is_compared_with_a_loss_and_a_batch_of_the_user(call, written) -> None:
    written("model.py", FILE)
    call("plan", "model.py:build", *PLANNED)
    check = ("check", "plan.json", "--model", "model.py:build", "--data", "model.py:batches", "--json", "--loss")
    assert json.loads(call(*check, "mse_loss").stdout)["parity"]["equal"]
    assert "batch" in str(json.loads(call(*check, "model.py:from_centre").stdout)["parity"]["notes"])


def test_numbers_that_are_not_those_of_the_model_end_with_5(call, written) -> None:
    written("model.py", FILE)
    call("plan", "model.py:mixing", *PLANNED)
    result = call("check", "plan.json", "--model", "model.py:mixing")
    assert "DIFFERENT" in result.stdout
    assert result.exit_code == 5
    assert not json.loads(call("check", "plan.json", "--model", "model.py:mixing", "--json").stdout)["parity"]["equal"]


def test_samples_that_act_on_each_other_are_noted(call, written) -> None:
    written("model.py", FILE)
    call("plan", "model.py:coupled", *PLANNED)
    assert "depends on all samples" in call("check", "plan.json", "--model", "model.py:coupled").stdout
