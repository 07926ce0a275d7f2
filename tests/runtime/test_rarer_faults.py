"""Faults outside of training steps, and of what is around the ranks: nothing hangs, and the cause is named."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset

import penstock
from penstock.errors import RunError
from tests.plans import quick_plan
from tests.process_pool import Pools
from tests.small_models import WIDTH, chain, noise

X, TARGET = noise(6, WIDTH), noise(6, WIDTH, seed=1)
pytestmark = pytest.mark.xdist_group("gloo")


class Killing(nn.Module):
    """A block that kills its process: in its first forward in a mode, on the rank that has been told to."""

    kills_in: bool | None = None
    """the mode"""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        """A layer."""
        if Killing.kills_in is self.training:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.linear(x)


def killed_in(mode: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Killing(), Killing())
    plan = quick_plan(model, (X,), loss_fn=mse_loss, ranks=2, microbatches=2, schedule="1f1b")
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss)
    if not mode:
        pipe.step(X, target=TARGET)
    if dist.get_rank() == 1:
        Killing.kills_in = mode
    pipe.step(X, target=TARGET) if mode else pipe.evaluate(X, target=TARGET)


def seconds_and_error(fn: Callable[..., object], *args: object) -> tuple[float, str]:
    began = time.monotonic()
    with pytest.raises(RunError) as caught:
        penstock.launch(fn, 2, *args)
    return time.monotonic() - began, str(caught.value)


@pytest.mark.whole
@pytest.mark.usefixtures("tidy")
@pytest.mark.parametrize("mode", [True, False], ids=["the first recording", "an evaluation"])
def test_a_rank_killed_outside_of_a_step_is_named(mode: bool) -> None:
    seconds, text = seconds_and_error(killed_in, mode)
    assert text.startswith("a rank was killed (rank: 1, signal: SIGKILL")
    assert seconds < 60  # the deadline, which is not what ends it


def forking() -> list[float]:
    """Losses of a rank whose code forks: children that end at once, by an error, or after the parent's next step."""
    pipe, losses = pipe_of(), []
    for end in ("exit", "error", "later"):
        losses.append(float(pipe.step(X, target=TARGET).loss))
        child = os.fork()
        if not child:
            if end == "later":
                time.sleep(0.2)
            # Both run the exit handlers that the child has inherited.
            sys.exit(0) if end != "error" else sys.exit("an error of a child")
        losses.append(float(pipe.step(X, target=TARGET).loss))
        os.waitpid(child, 0)
        losses.append(float(pipe.evaluate(X, target=TARGET).loss))
    return losses


def pipe_of(**given: Any) -> Any:
    model = chain(4)
    plan = quick_plan(model, (X,), loss_fn=mse_loss, ranks=2, microbatches=2, schedule="1f1b")
    return penstock.Pipeline(model, plan, loss_fn=mse_loss, **given)


@pytest.mark.whole
@pytest.mark.usefixtures("tidy")
def test_children_that_user_code_forks_do_not_disturb_their_rank() -> None:
    first, second = penstock.launch(forking, 2)
    assert first == second
    assert len(set(first)) == 1


class Dying(Dataset[Any]):
    """Data whose worker is killed at the third batch."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 12:
            os.kill(os.getpid(), signal.SIGKILL)
        return X[index % 6], TARGET[index % 6]


def with_dying_workers() -> None:
    pipe = pipe_of()
    data = DataLoader(Dying(), batch_size=6, num_workers=1 if dist.get_rank() else 0)
    if not dist.get_rank():
        data = [(X, TARGET)] * 10  # type: ignore[assignment]
    penstock.fit(pipe, data, torch.optim.SGD(pipe.parameters(), lr=0.1))


@pytest.mark.whole
def test_a_data_loader_worker_that_dies_ends_all_ranks_with_its_error() -> None:
    _, text = seconds_and_error(with_dying_workers)
    assert "rank: 1" in text.splitlines()[0]
    assert "DataLoader worker" in text
    assert "killed by signal" in text or "exited unexpectedly" in text


def slow_disk(path: str) -> list[float]:
    """Saves to a disk that takes longer than the deadline, at once and in the background."""
    pipe = pipe_of(options=penstock.RunOptions(deadline_seconds=2.0))
    sync_to_disk = os.fsync

    def slow_sync(file: int) -> None:
        time.sleep(1.0)
        sync_to_disk(file)

    if dist.get_rank():
        os.fsync = slow_sync
    losses = [float(pipe.step(X, target=TARGET).loss)]
    pipe.save(path)
    losses.append(float(pipe.step(X, target=TARGET).loss))
    pipe.save(path, asynchronous=True)
    losses += [float(pipe.step(X, target=TARGET).loss) for _ in range(3)]
    pipe.wait_for_save()
    assert pipe.load(path).step == 2
    return losses


@pytest.mark.whole
@pytest.mark.usefixtures("tidy")
def test_a_slow_disk_delays_a_save_and_neither_fails_it_nor_stops_training(tmp_path: Path) -> None:
    first, second = penstock.launch(slow_disk, 2, str(tmp_path))
    assert first == second
    assert len(set(first)) == 1


def other_versions() -> list[str]:
    words = []
    real = torch.__version__
    for version in ("2.12.0", real):
        torch.__version__ = version if dist.get_rank() else real
        try:
            pipe_of()
        except RunError as error:
            words.append(str(error).splitlines()[0])
        else:
            words.append("not refused")
        finally:
            torch.__version__ = real
    return words


@pytest.mark.gloo
def test_ranks_with_other_versions_are_refused_with_both(pools: Pools) -> None:
    for words in pools[2].run(other_versions):
        assert words[0].startswith("version of torch must be the same on every rank (rank 0: ")
        assert "rank 1: 2.12.0" in words[0]
        assert words[1] == "not refused"


def jumping_clock() -> list[float]:
    """Losses of ranks whose wall clock jumps a day ahead and back."""
    pipe, losses, real = pipe_of(options=penstock.RunOptions(deadline_seconds=20.0)), [], time.time
    try:
        for jump in (0.0, 86400.0, -86400.0):
            time.time = lambda jump=jump: real() + jump * (1 + dist.get_rank())  # type: ignore[assignment]
            losses.append(float(pipe.step(X, target=TARGET).loss))
            losses.append(float(pipe.evaluate(X, target=TARGET).loss))
    finally:
        time.time = real
    return losses


@pytest.mark.gloo
def test_jumps_of_the_wall_clock_have_no_effect(pools: Pools) -> None:
    first, second = pools[2].run(jumping_clock)
    assert first == second
    assert len(set(first)) == 1


WITHOUT_RIGHTS = """
import os, sys
import torch, penstock
from torch import nn
from torch.nn.functional import mse_loss
torch.manual_seed(0)
model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(2, 4)
plan = penstock.plan(model, (x,), ranks=2, microbatches=2, loss_fn=mse_loss, schedule="1f1b", partitioner="uniform")
pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, local=True)
pipe.step(x, target=x)
pipe.save(sys.argv[1])
# Only now: the files of Python itself may be another user's.
os.setgroups([]); os.setgid(65534); os.setuid(65534)
print(float(pipe.step(x, target=x).loss) >= 0)
for path in sys.argv[1:]:
    for use in (pipe.save, pipe.load):
        try:
            print(use(path))
        except penstock.CheckpointError as error:
            print(str(error).replace("\\n", " "))
"""


@pytest.mark.whole
@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="only root can become another user")
def test_a_user_without_rights_trains_and_is_told_which_directory_is_not_writable(tmp_path: Path) -> None:
    closed, foreign = tmp_path / "closed", tmp_path / "foreign"
    closed.mkdir(mode=0o700)
    foreign.mkdir(mode=0o755)
    for parent in tmp_path.parents:
        if parent.stat().st_uid == 0 and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)
    tmp_path.chmod(0o755)
    environment = {**os.environ, "HOME": "/nonexistent", "PENSTOCK_CACHE": "/nonexistent/cache"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WITHOUT_RIGHTS), str(closed), str(foreign)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, *errors = done.stdout.splitlines()
    assert first == "True"
    assert len(errors) == 4
    assert all("Permission denied" in line or "no checkpoint" in line for line in errors), errors
