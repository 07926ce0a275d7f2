"""trace: orders from a file as a Chrome trace."""

import gzip
import json
from pathlib import Path

import pytest

from penstock import schedule, simulate
from penstock.ir import save_record


def events(path: Path) -> list[dict]:
    content = path.read_bytes()
    return json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)["traceEvents"]


def test_a_schedule_becomes_a_trace_of_all_its_passes(call, written, tmp_path: Path) -> None:
    call("trace", written("s.csv", schedule("1f1b", 2, 3).to_csv()), "out.json")
    names = {event["name"] for event in events(tmp_path / "out.json") if event["ph"] == "X"}
    assert {"0F0", "1B2", "0SEND_F1"} <= names


def test_seconds_are_those_that_are_given(call, written, tmp_path: Path) -> None:
    call("trace", written("s.csv", schedule("1f1b", 1, 1).to_csv()), "out.json", "--forward", "2")
    (forward,) = (event for event in events(tmp_path / "out.json") if event["name"] == "0F0")
    assert forward["dur"] == 2e6


def test_a_trace_is_written_as_it_is(call, tmp_path: Path) -> None:
    save_record(simulate(schedule("gpipe", 2, 2)), tmp_path / "trace.json")
    answer = json.loads(call("trace", "trace.json", "out.json.gz", "--json").stdout)
    assert answer == {"file": "out.json.gz", "makespan": 9.0, "bubble": pytest.approx(1 / 3)}
    assert events(tmp_path / "out.json.gz")


def test_arrows_are_drawn_when_asked_for(call, written, tmp_path: Path) -> None:
    file = written("s.csv", schedule("1f1b", 2, 3).to_csv())
    call("trace", file, "plain.json")
    call("trace", file, "arrows.json", "--flows")
    assert {"s", "f"} & {event["ph"] for event in events(tmp_path / "plain.json")} == set()
    assert {"s", "f"} <= {event["ph"] for event in events(tmp_path / "arrows.json")}


@pytest.mark.parametrize("orders", ["0F0,0RECV_B0,0B0\n1F0,1B0,1SEND_B0", "0F0,0B0\n1B0,1F0"])
def test_orders_that_are_not_proven_are_refused(orders: str, call, written, tmp_path: Path) -> None:
    file = written("x.csv", orders)
    result = call("trace", file, "out.json")
    assert result.output == call("check", file).output
    assert result.exit_code == 2
    assert not (tmp_path / "out.json").exists()
