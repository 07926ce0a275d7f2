"""show: any noun of a file in the terminal, or as a document."""

from pathlib import Path

from penstock import StageCosts, lower, schedule, simulate
from penstock.ir import codec
from penstock.ir.profile import NodeCost, Profile


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
    assert "the proof refuses these orders" in result.output
    assert "rank 1 stands at 1B0" in result.output
    assert result.exit_code == 0


def test_orders_that_run_but_are_unlawful_are_not_drawn_as_if_they_were_lawful(call, written) -> None:
    result = call("show", written("unlawful.csv", "0F0,0RECV_B0,0B0\n1F0,1B0,1SEND_B0\n"))
    assert "0F0 0RECV_B0 0B0\n" in result.output
    assert "the proof refuses these orders: an action needs a value that has no Send" in result.output
    assert result.exit_code == 0


def test_a_trace_is_drawn(call, tmp_path: Path) -> None:
    codec.save(simulate(schedule("zbv", 2, 4)), tmp_path / "trace.json")
    assert "makespan 25 s" in call("show", "trace.json").output


def test_a_profile_is_a_table_of_costs(call, tmp_path: Path) -> None:
    codec.save(Profile((NodeCost("head", 0.001, 0.002, 0.001, 0.001),), 0.003, "", "cpu"), tmp_path / "profile.json")
    output = call("show", "profile.json").output
    assert "1 node, a step of one microbatch 3 ms" in output
    assert "| head |      1.000 |       2.000 |" in output


def test_any_other_noun_is_printed_by_its_fields(call, tmp_path: Path) -> None:
    codec.save(StageCosts.uniform(2, forward=3.0), tmp_path / "costs.json")
    assert "forward=(" in call("show", "costs.json").output


def test_a_csv_becomes_a_document_that_is_read_back_as_the_same(call, written) -> None:
    made = schedule("zbv", 2, 3)
    assert codec.from_json(call("show", "--json", written("zbv.csv", made.to_csv())).stdout) == made
