"""show: any record of a file in the terminal, or as a document."""

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import penstock
from penstock import Plan, StageCosts, lower, schedule, simulate
from penstock.ir import Graph, NodeCost, Profile, Run, StepMetrics, Trace, from_json, save_record, seconds_text
from penstock.views import VIEWS


def test_a_csv_is_drawn_and_measured(call, written) -> None:
    output = call("show", written("1f1b.csv", schedule("1f1b", 2, 2).to_csv())).output
    assert "Schedule: 2 ranks, 2 stages, 2 microbatches, 8 actions" in output
    assert "rank 0 F0-F1-" in output
    assert "33.3 %" in output


def test_orders_with_messages_are_a_program(call, written) -> None:
    program = lower(schedule("1f1b", 2, 2))
    assert "Program: 2 ranks" in call("show", written("program.csv", program.to_csv())).output


def test_orders_that_block_are_shown_as_they_are(call, written) -> None:
    result = call("show", written("blocked.csv", "0F0,0B0\n1B0,1F0\n"))
    assert "0F0 0B0\n1B0 1F0\n" in result.output
    assert "not proven" in result.output
    assert "rank 1 is blocked at 1B0" in result.output
    assert result.exit_code == 0


def test_orders_that_run_but_are_unlawful_are_not_drawn_as_if_they_were_lawful(call, written) -> None:
    result = call("show", written("unlawful.csv", "0F0,0RECV_B0,0B0\n1F0,1B0,1SEND_B0\n"))
    assert "0F0 0RECV_B0 0B0\n" in result.output
    assert "not proven: an action needs a value that has no Send" in result.output
    assert result.exit_code == 0


def test_a_trace_is_drawn(call, tmp_path: Path) -> None:
    save_record(simulate(schedule("zbv", 2, 4)), tmp_path / "trace.json")
    assert "makespan 25 s" in call("show", "trace.json").output


def test_a_profile_is_a_table_of_costs(call, tmp_path: Path) -> None:
    save_record(Profile((NodeCost("head", 0.001, 0.002, 0.001, 0.001),), 0.003, "", "cpu"), tmp_path / "profile.json")
    output = call("show", "profile.json").output
    assert "1 node, a step of one microbatch 3 ms" in output
    assert "| head |      1.000 |       2.000 |" in output


@cache
def plan() -> Plan:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    return penstock.plan(model, (torch.ones(4, 4),), ranks=2, microbatches=2, schedule="1f1b", partitioner="uniform")


def test_a_graph_is_an_outline(call, tmp_path: Path) -> None:
    save_record(plan().graph, tmp_path / "graph.json")
    assert call("show", "graph.json").output.startswith("4 nodes, 80 parameters, 320 B")


def test_a_run_is_its_plan_its_steps_and_its_last_recorded_step(call, tmp_path: Path) -> None:
    steps = (StepMetrics(0, 2.5, 0.1, 4, 1.0), StepMetrics(1, float("nan"), 0.2, 4))
    run = Run(plan(), steps, (simulate(plan()),), (100, 200), 1e-7, batches_per_step=3)
    save_record(run, tmp_path / "run.json")
    output = call("show", "run.json").output
    assert "2 stages (uniform) on 2 ranks" in output
    assert "2.5 |             1 | 100 ms |" in output
    assert "not finite" in output
    assert f"200 ms per step, {seconds_text(3 * plan().predicted.makespan)} predicted" in output
    assert "largest difference to the unsplit model: 1.0e-07" in output
    assert "rank 1 " in output


def test_the_trace_of_a_plan_and_of_a_run_is_written(call, tmp_path: Path) -> None:
    save_record(plan(), tmp_path / "plan.json")
    save_record(Run(plan(), (), (simulate(plan()),)), tmp_path / "run.json")
    for name in ("plan", "run"):
        assert call("trace", f"{name}.json", f"{name}.trace.json").exit_code == 0
    assert (tmp_path / "plan.trace.json").read_text() == (tmp_path / "run.trace.json").read_text()


def test_any_other_noun_is_printed_by_its_fields(call, tmp_path: Path) -> None:
    save_record(StageCosts.uniform(2, forward=3.0), tmp_path / "costs.json")
    assert "forward=(" in call("show", "costs.json").output


def test_a_csv_becomes_a_document_that_is_read_back_as_the_same(call, written) -> None:
    made = schedule("zbv", 2, 3)
    assert from_json(call("show", "--json", written("zbv.csv", made.to_csv())).stdout) == made


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_of_the_table_can_be_shown_and_written(view: str, call, tmp_path: Path) -> None:
    save_record(Run(plan(), (), (simulate(plan()),)), tmp_path / "run.json")
    save_record(Profile((NodeCost("head", 0.001, 0.002, 0.001, 0.001),), 0.003, "", "cpu"), tmp_path / "profile.json")
    file = "profile.json" if VIEWS[view].record is Profile else "run.json"
    shown = call("show", file, "--view", view)
    assert shown.exit_code == 0
    name = f"view{VIEWS[view]().suffix}"
    assert call("show", file, "--view", view, "--out", name).exit_code == 0
    text = (tmp_path / name).read_text()
    # The terminal view is as wide as the terminal, which a file is not.
    assert text if view == "terminal" else text == shown.output.removesuffix("\n")
    assert f" {view}" in call("show", "--help").output.replace("\n ", " ")


@pytest.mark.parametrize(("view", "record"), [("timeline", Trace), ("model", Graph), ("table", penstock.Schedule)])
def test_a_view_is_drawn_of_its_own_record_too(view: str, record: type, call, tmp_path: Path) -> None:
    save_record({Trace: simulate(plan()), Graph: plan().graph}.get(record, plan().schedule), tmp_path / "record.json")
    assert call("show", "record.json", "--view", view).exit_code == 0


def test_a_picture_is_a_png_if_the_file_is_one(call, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    save_record(plan(), tmp_path / "plan.json")
    call("show", "plan.json", "--view", "memory", "--out", "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--view", "hologram"), "unknown view"),
        (("--out", "picture.svg"), "--out must be given with --view"),
        (("--out", "picture.svg"), "--view with one of terminal, table, timeline"),
        (("--view", "profile"), "this view must be given a profile"),
    ],
)
def test_a_view_that_does_not_exist_or_fit_is_refused(options: tuple[str, ...], message: str, call, tmp_path) -> None:
    save_record(plan(), tmp_path / "plan.json")
    result = call("show", "plan.json", *options)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split()) + " ".join(result.stderr.split())
