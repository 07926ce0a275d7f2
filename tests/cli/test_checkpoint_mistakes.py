"""What cannot last is refused before work is spent, with a way out."""

import threading
import time

import pytest
from typer.testing import CliRunner

from benchmarks.short_training import COMMAND, Outcome, ShortTraining
from penstock.cli import app
from penstock.cli.restarts import locked
from penstock.launch import ALLOW_VARIABLE
from tests.cli.checkpoint_runs import refused


@pytest.fixture(scope="module")
def earlier(training: ShortTraining) -> Outcome:
    """A training of four steps, with checkpoints of the third and the fourth; no test changes it."""
    return training.run(steps=4)


@pytest.mark.usefixtures("earlier")
def test_an_earlier_training_is_not_overwritten(training: ShortTraining) -> None:
    assert "try: --resume auto to resume it" in refused(training, "--checkpoint", "saved")


@pytest.mark.usefixtures("earlier")
def test_two_trainings_are_not_mixed(training: ShortTraining) -> None:
    older = ("--checkpoint", "saved", "--resume", "saved/step-000003")
    assert "the directory has newer checkpoints" in refused(training, *older)


def test_two_trainings_do_not_save_into_one_directory(
    training: ShortTraining, earlier: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.cli.restarts._LOCK_SECONDS", 0.0)
    with locked(training.directory / "saved"):
        found = training.run((), "--resume", "auto", fresh=False)
    assert (found.exit_code, found.losses) == (2, earlier.losses)
    assert "another run is saving to this directory" in found.output


@pytest.mark.usefixtures("earlier")
def test_a_training_that_has_waited_for_another_looks_again(training: ShortTraining) -> None:
    saved, other = training.directory / "saved", training.directory / "other"
    saved.rename(other)
    saved.mkdir()
    is_held = threading.Event()

    def save_meanwhile() -> None:
        with locked(saved):
            is_held.set()
            time.sleep(1.0)
            for checkpoint in other.iterdir():
                checkpoint.rename(saved / checkpoint.name)

    thread = threading.Thread(target=save_meanwhile)
    thread.start()
    is_held.wait()
    output = refused(training, "--checkpoint", "saved", "--steps", "2")
    thread.join()
    other.rmdir()
    assert "the directory already has checkpoints of a run" in output


@pytest.mark.parametrize(
    "option", ["--resume auto", "--min-ranks 1", "--every 10", "--keep 1", "--asynchronous", "--restarts 5"]
)
def test_options_that_need_checkpoints_are_refused_without_them(option: str, training: ShortTraining) -> None:
    assert f"{option.split(maxsplit=1)[0]} needs --checkpoint" in refused(training, *option.split())


@pytest.mark.usefixtures("earlier")
def test_directories_that_cannot_be_are_refused(training: ShortTraining) -> None:
    assert "must be a directory, got a file" in refused(training, "--checkpoint", "model.py")
    assert "--checkpoint saved --resume saved/step-000003" in refused(training, "--checkpoint", "saved/step-000003")
    assert "no such checkpoint to resume from" in refused(training, "--checkpoint", "new", "--resume", "nowhere")


def test_a_deadline_that_is_none_is_refused(training: ShortTraining) -> None:
    assert "try: --deadline 60" in refused(training, "--deadline", "0")


def test_faults_are_refused_unless_allowed(training: ShortTraining, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(training.directory)
    monkeypatch.delenv(ALLOW_VARIABLE, raising=False)
    result = CliRunner().invoke(app, [*COMMAND, "--fault", "kill,step=1"])
    assert result.exit_code == 2
    assert f"try: {ALLOW_VARIABLE}=1" in result.output


def test_a_fault_is_for_a_rank_that_there_is(training: ShortTraining) -> None:
    found = training.run(["kill,rank=9,step=1"])
    assert (found.exit_code, found.restarts) == (5, 0)
    assert "a fault names a rank that does not exist (rank: 9, ranks: 2)" in found.output


def test_more_ranks_cannot_be_left_than_the_plan_has(training: ShortTraining) -> None:
    assert "try: --min-ranks 2 or less" in refused(training, "--checkpoint", "new", "--min-ranks", "3")
