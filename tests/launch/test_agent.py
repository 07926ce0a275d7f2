"""Ranks of torchrun end with its agent; processes that nobody supervises outlive their parent."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.errors import RunError
from penstock.launch import agent
from penstock.launch.process_state import GONE, process_state
from tests.leftovers import wait_until


def orphan(directory: Path, environment: dict[str, str]) -> int:
    """Fork a parent that ends once its child watches over it; returns the pid of the child, which would live long."""
    parent = os.fork()
    if not parent:
        if os.fork() == 0:
            os.environ.update(environment)
            agent.exit_with_agent()
            (directory / "pid").write_text(str(os.getpid()))
            os.rename(directory / "pid", directory / "ready")
            time.sleep(60)
            os._exit(0)
        wait_until(lambda: (directory / "ready").exists())
        os._exit(0)
    os.waitpid(parent, 0)
    return int((directory / "ready").read_text())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("environment", "ends"),
    [
        ({}, False),  # as under nohup, setsid, or in a closed terminal
        ({agent.PARENT_VARIABLE: "1"}, True),
        ({"TORCHELASTIC_RUN_ID": "x"}, True),
        ({"TORCHELASTIC_RUN_ID": "x", agent.PARENT_VARIABLE: "0"}, False),
    ],
)
def test_a_process_ends_with_its_parent_only_if_that_supervises_it(
    tmp_path: Path, environment: dict[str, str], ends: bool
) -> None:
    pid = orphan(tmp_path, environment)
    if ends:
        wait_until(lambda: process_state(pid) == GONE)
    else:
        time.sleep(3 * agent._POLL_SECONDS)
        assert process_state(pid) != GONE
        os.kill(pid, 9)


def test_a_process_without_stdout_is_ended_too() -> None:
    program = "import os, sys; sys.stdout = None; from penstock.launch.agent import end_process; end_process('over')"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (agent.EXIT_CODE, "penstock: over\n")


def test_a_rank_whose_agent_is_gone_before_it_looks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "_find_agent", lambda: None)
    for name, value in {
        "TORCHELASTIC_RUN_ID": "x",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RunError, match="agent of torchrun"):
        agent.exit_with_agent()
