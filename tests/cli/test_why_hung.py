"""why-hung: the notes of the ranks of a run, joined to an answer."""

import json
from pathlib import Path

from penstock.ir import Forward, Recv, encode
from penstock.launch import StatusFile


def noted(run: Path) -> None:
    """Rank 1 waits for what rank 0, which is still in its forward, has not sent."""
    boards = [StatusFile.create(run / "status", rank, 2) for rank in range(2)]
    boards[0].working(7, code_of(Forward(0, 3)))
    boards[1].waiting(7, code_of(Recv(1, 3, 0)), 0)


def code_of(action: Forward | Recv) -> int:
    return int(encode([action])[0])


def test_the_rank_that_the_others_wait_for_is_named(call, tmp_path: Path) -> None:
    noted(tmp_path / "run")
    first, second = call("why-hung", "run").stdout.splitlines()
    assert first.startswith("rank 0: no progress, working on 0F3 of step 7 for ")
    assert second.startswith("rank 1: waiting for 1RECV_F3 of step 7 from rank 0 for ")


def test_programs_get_the_notes_themselves(call, tmp_path: Path) -> None:
    noted(tmp_path / "run")
    found = json.loads(call("why-hung", "run", "--json").stdout)
    assert [(each["rank"], each["state"], each["step"], each["peer"]) for each in found] == [
        (0, "working", 7, None),
        (1, "waiting", 7, 0),
    ]


def test_a_directory_without_notes_is_refused(call) -> None:
    result = call("why-hung", "nothing")
    assert result.exit_code == 2
    assert "no status files in the directory (directory: nothing/status)" in result.output
