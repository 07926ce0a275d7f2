"""`penstock train --checkpoint` restarts after every kind of failure with the losses of an uninterrupted run."""

import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import faults
from benchmarks.checkpoint_checks import checkpoint_checks
from benchmarks.short_training import COMMAND, STEPS, Outcome, ShortTraining
from benchmarks.torchrun_kills import LIMIT_SECONDS, Torchrun, killed_agents
from benchmarks.watched_training import is_local, left_over, listeners
from penstock.checkpoint import CheckpointDir
from penstock.cli.output import note
from penstock.cli.train_log import read_steps
from penstock.launch import ALLOW_VARIABLE, RestartPolicy, StatusFile
from tests.cli.checkpoint_runs import LASTING, in_a_copy
from tests.leftovers import tidy, wait_until

__all__ = ["tidy"]


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restarts follow sooner; tests/launch/test_restart.py has the pauses."""
    short = partial(RestartPolicy, first_pause_seconds=0.05)
    # By its module: `penstock.launch` is a function.
    monkeypatch.setattr(import_module("penstock.launch"), "RestartPolicy", short)


def test_a_training_without_faults_ends_without_restarts(clean: Outcome) -> None:
    assert (clean.exit_code, clean.restarts, len(clean.losses), clean.bad) == (0, 0, STEPS, ())


@pytest.mark.usefixtures("short_pauses")
def test_several_failures_in_a_row_change_no_loss_and_leave_files_that_only_the_user_can_read(
    training: ShortTraining, clean: Outcome
) -> None:
    breaks = ("kill,rank=1,step=5,action=4", "raise,rank=0,step=7,attempt=1", "exit,rank=1,save=9,attempt=2")
    found = training.run(breaks)
    assert (found.exit_code, found.restarts, found.bad) == (0, 3, ())
    assert found.losses == clean.losses
    paths = [training.directory / "saved", *(training.directory / "saved").rglob("*")]
    assert {path.stat().st_mode & 0o777 for path in paths if path.is_dir()} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in paths if path.is_file()} == {0o600}


@pytest.mark.usefixtures("short_pauses")
def test_a_training_with_asynchronous_checkpoints_restarts_with_the_same_losses(
    training: ShortTraining, clean: Outcome
) -> None:
    found = training.run(["kill,rank=1,save=4", "kill,rank=0,step=8,attempt=1"], "--asynchronous")
    assert (found.exit_code, found.restarts, found.bad) == (0, 2, ())
    assert found.losses == clean.losses
    assert "step-000010" in {path.name for path in CheckpointDir(training.directory / "saved").checkpoints}


@pytest.mark.usefixtures("short_pauses")
def test_a_rank_that_hangs_is_restarted_after_the_deadline(training: ShortTraining, clean: Outcome) -> None:
    found = training.run(["stop,rank=1,step=5,action=3"], "--deadline", "5")
    assert (found.exit_code, found.restarts) == (0, 1)
    assert "timed out waiting" in found.output
    assert found.losses == clean.losses


@pytest.mark.usefixtures("short_pauses")
def test_the_same_error_at_the_same_step_twice_ends_it_with_one_report(training: ShortTraining) -> None:
    found = training.run(["raise,rank=1,step=5,action=4,attempt=every"])
    assert (found.exit_code, found.restarts, len(found.losses)) == (5, 1, 5)
    assert "the same error occurred twice at the same step" in found.output
    assert found.output.count("Traceback") <= 1


@pytest.mark.usefixtures("short_pauses")
def test_the_number_of_restarts_is_limited(training: ShortTraining) -> None:
    faults = [f"kill,rank=0,step={5 + attempt},attempt={attempt}" for attempt in range(3)]
    found = training.run(faults, "--restarts", "2")
    assert (found.exit_code, found.restarts) == (5, 2)
    assert "the limit of --restarts" in found.output


@pytest.mark.usefixtures("short_pauses")
def test_a_rank_that_fails_permanently_leads_to_a_plan_for_fewer_ranks(training: ShortTraining, clean: Outcome) -> None:
    found = training.run(["kill,rank=1,step=5", "kill,rank=1,after=0,attempt=1"], "--min-ranks", "1", "--budget", "0")
    assert (found.exit_code, found.restarts) == (0, 2)
    assert "with 1 rank, because rank 1 failed permanently" in found.output
    assert found.losses == pytest.approx(clean.losses, rel=1e-6)


@pytest.mark.usefixtures("short_pauses")
def test_without_output_files_the_last_line_names_the_steps_since_the_restart(training: ShortTraining) -> None:
    shutil.rmtree(training.directory / "saved", ignore_errors=True)
    saving = ("--checkpoint", "saved", "--every", 3, "--steps", 5)
    code, output = training.call(*COMMAND, *saving, "--fault", "raise,rank=0,step=4")
    assert (code, "restart 1 of" in output, "\nsteps 4 to 5: loss " in output) == (0, True, True), output


def test_without_checkpoints_there_is_no_restart(training: ShortTraining) -> None:
    code, output = training.call(*COMMAND, "--steps", 3, "--fault", "kill,rank=1,step=1")
    assert code == 5
    assert "a rank was killed (rank: 1, signal: SIGKILL, step: 1" in output
    assert "restart" not in output


def test_a_failed_asynchronous_checkpoint_is_reported(
    training: ShortTraining, clean: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training.run(steps=1)
    monkeypatch.setenv(ALLOW_VARIABLE, "1")
    options = (*LASTING, "--asynchronous", "--steps", str(STEPS), "--fault", "full-disk,rank=1,step=6")
    assert os.waitpid(in_a_copy(training.directory, tmp_path / "output.txt", *options), 0)[1] == 0
    output = (tmp_path / "output.txt").read_text()
    assert "CHECKPOINT OF STEP 6 NOT WRITTEN, training continues; the newest is that of step 3" in output
    assert "No space left" in output
    assert training.run((), "--resume", "auto", fresh=False).losses == clean.losses


class Started:
    """The command in a process of its own that has taken some steps."""

    def __init__(self, training: ShortTraining, scratch: Path, output: Path) -> None:
        self._directory, self._output = training.directory, output
        for name in ("out", "saved"):
            shutil.rmtree(self._directory / name, ignore_errors=True)
        os.environ["PENSTOCK_SCRATCH"] = os.fspath(scratch)
        self.pid = in_a_copy(self._directory, output, *LASTING, "--every", "1000", "--json")
        del os.environ["PENSTOCK_SCRATCH"]
        wait_until(lambda: len(self.step_lines) >= 4)

    @property
    def step_lines(self) -> list[str]:
        """The steps so far."""
        return (
            [line for line in self._output.read_text().splitlines() if line.startswith("{")]
            if self._output.exists()
            else []
        )

    def rank(self, rank: int) -> int:
        return StatusFile.read(self._directory / "out" / "status")[rank].pid

    def asked(self, pid: int, number: int = signal.SIGTERM) -> tuple[int, int]:
        """The exit code once a process was sent a signal, and the number of steps in its output."""
        os.kill(pid, number)
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status), len(self.step_lines)


@pytest.fixture
def started(training: ShortTraining, tidy: Path, tmp_path: Path) -> Started:
    """It leaves no process and no file."""
    return Started(training, tidy, tmp_path / "output.txt")


@pytest.mark.parametrize(
    ("who", "number"),
    [
        ("the launcher", signal.SIGTERM),
        ("rank 1", signal.SIGINT),
        pytest.param("the launcher", signal.SIGINT, marks=pytest.mark.whole),
        pytest.param("rank 1", signal.SIGTERM, marks=pytest.mark.whole),
    ],
)
def test_a_stop_signal_saves_the_step_that_all_ranks_finished(
    training: ShortTraining, started: Started, who: str, number: int
) -> None:
    code, num_steps = started.asked(started.pid if who == "the launcher" else started.rank(1), number)
    assert code == 0
    assert [path.name for path in CheckpointDir(training.directory / "saved").checkpoints] == [f"step-{num_steps:06d}"]


def test_ranks_listen_on_loopback_only_and_end_with_a_launcher_that_is_killed(
    training: ShortTraining, started: Started, tidy: Path
) -> None:
    if shutil.which("ss"):
        places = listeners((started.pid, started.rank(0), started.rank(1)))
        assert places, "every rank has a socket for the others"
        assert [place for place in places if not is_local(place)] == []
    assert started.asked(started.pid, signal.SIGKILL)[0] == -signal.SIGKILL
    wait_until(lambda: not left_over(tidy, training.directory))  # files are removed after the ranks have ended


@pytest.mark.whole  # tests/cli/test_train.py has a shorter run under torchrun
def test_torchrun_restarts_a_training_and_forwards_a_stop_signal(training: ShortTraining, clean: Outcome) -> None:
    for name in ("out", "saved"):
        shutil.rmtree(training.directory / name, ignore_errors=True)
    torchrun = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "-m", "penstock")
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *torchrun, *COMMAND, *LASTING, "--fault", "kill,rank=1,step=7"],
        cwd=training.directory,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", ALLOW_VARIABLE: "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    while "step 10 " not in process.stdout.readline():
        assert process.poll() is None
    process.terminate()
    step_lines = [line for line in process.communicate(timeout=240)[0].splitlines() if line.startswith("step ")]
    newest = CheckpointDir(training.directory / "saved").checkpoints[0].name
    assert newest == f"step-{10 + len(step_lines):06d}"
    steps = read_steps(training.directory / "out")
    assert [metrics.loss for metrics in steps][:STEPS] == list(clean.losses)


def test_ranks_and_their_workers_end_when_torchrun_is_killed_and_release_the_directory(
    training: ShortTraining, tmp_path: Path
) -> None:
    for name in ("out", "saved"):
        shutil.rmtree(training.directory / name, ignore_errors=True)
    torchrun = Torchrun(training, tmp_path)
    torchrun.wait_for_steps(2)
    killed = torchrun.kill()
    assert (killed.is_free, killed.left) == (True, [])
    assert killed.seconds <= LIMIT_SECONDS


@pytest.mark.whole
def test_twenty_kills_of_torchrun() -> None:
    assert killed_agents().show().passes


def test_a_restart_reports_the_checkpoint_it_resumes_from(training: ShortTraining) -> None:
    training.run(steps=4)
    (training.directory / "saved").rename(training.directory / "older")
    found = training.run(["kill,rank=1,step=5"], "--resume", "older/step-000003", "--every", "100", fresh=False)
    assert "restart 1 of 3 in 0.5 s from older/step-000003" in found.output
    shutil.rmtree(training.directory / "older")
    (training.directory / "saved" / "step-999999999999999999").mkdir()
    found = training.run(["kill,rank=1,step=13"], "--resume", "auto", fresh=False, steps=14)
    assert "from step 12" in found.output


def test_an_injected_slow_rank_is_reported(
    training: ShortTraining, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ALLOW_VARIABLE, "1")
    shutil.rmtree(training.directory / "saved", ignore_errors=True)
    options = (*LASTING, "--steps", "35", "--fault", "slow,rank=1,step=20,seconds=0.005")
    assert os.waitpid(in_a_copy(training.directory, tmp_path / "output.txt", *options), 0)[1] == 0
    before, _, after = (tmp_path / "output.txt").read_text().partition("rank 1 is slow since step")
    assert before.count("\nstep ") < 20 + 10
    assert "a plan for that" in after


def test_a_stop_signal_between_two_attempts_prevents_a_restart(
    training: ShortTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    def note_and_stop(text: str) -> None:
        note(text)
        (training.directory / "out" / "status" / "stop").touch()

    monkeypatch.setattr("penstock.cli.restarts.note", note_and_stop)
    found = training.run(["kill,rank=1,step=5"])
    assert (found.exit_code, found.restarts) == (0, 1)
    assert "stopped before the restart from step 3" in found.output


def test_a_last_checkpoint_that_cannot_be_written_ends_the_run_with_an_error(training: ShortTraining) -> None:
    found = training.run(["full-disk,rank=0,step=4"], steps=4)
    assert (found.exit_code, found.restarts, len(found.losses)) == (5, 0, 4)
    assert "the last checkpoint was not written" in found.output


@pytest.mark.whole
def test_a_few_rounds_of_injected_faults_end_as_expected() -> None:
    names = (*faults.FAULTS, faults.FULL_DISK)
    lines = [*faults.injected_faults(names, rounds=2).lines, *checkpoint_checks(damages=12).lines]
    assert [line.cells for line in lines if not line.passes] == []
    assert len(lines) == 10
