"""Children of a rank end with it: forked ones, data-loader workers and programs, whether the rank succeeds or not."""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from penstock.errors import RunError
from penstock.launch import launch
from penstock.launch.process_state import GONE, process_state
from tests.leftovers import wait_until

SECONDS = 600


def start_children(directory: Path) -> None:
    """Start a child of each kind and write down their pids."""
    loader = DataLoader(list(torch.ones(64, 4)), num_workers=1, persistent_workers=True)
    batches = iter(loader)
    next(batches)
    start_children.kept = batches  # type: ignore[attr-defined]
    forked = os.fork()
    if not forked:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(SECONDS)
        os._exit(0)
    program = subprocess.Popen(["sleep", str(SECONDS)])
    workers = Path("/proc/self/task").glob("*/children")
    pids = {*" ".join(task.read_text() for task in workers).split(), str(forked), str(program.pid)}
    assert len(pids) >= 3
    file = directory / f"children-{dist.get_rank()}"
    file.with_suffix(".part").write_text(" ".join(pids))
    file.with_suffix(".part").rename(file)


def children(directory: Path) -> list[int]:
    return [int(pid) for file in directory.glob("children-?") for pid in file.read_text().split()]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A scratch directory with a short name, as the names of sockets in it must be short; it is empty at the end."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        monkeypatch.setenv("PENSTOCK_SCRATCH", name)
        yield Path(name)
        assert list(Path(name).iterdir()) == []


@pytest.mark.parametrize("end", ["success", "an exception", "a killed rank", "a killed launcher"])
def test_children_end_with_their_rank(tidy: Path, short: Path, end: str) -> None:
    directory = tidy.parent

    def work() -> None:
        start_children(directory)
        if end == "a killed launcher":
            time.sleep(SECONDS)
        dist.barrier()
        if dist.get_rank() == 1 and end == "an exception":
            raise ValueError(end)
        if dist.get_rank() == 1 and end == "a killed rank":
            signal.raise_signal(signal.SIGKILL)

    if end == "a killed launcher":
        if not (pid := os.fork()):
            launch(work, 2)
            os._exit(0)
        wait_until(lambda: len(list(directory.glob("children-?"))) == 2)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        wait_until(lambda: not list(short.iterdir()))
    else:
        with contextlib.nullcontext() if end == "success" else pytest.raises(RunError):
            launch(work, 2)
    wait_until(lambda: all(process_state(pid) == GONE for pid in children(directory)))
