"""A saved training resumes with the losses of an uninterrupted run, or an error explains why not."""

import os
import shutil
from pathlib import Path

import pytest

from benchmarks.short_training import COMMAND, STEPS, Outcome, ShortTraining
from penstock.checkpoint import CheckpointDir
from penstock.cli.train_log import read_steps
from penstock.ir import Run
from tests.cli.checkpoint_runs import DATA, LASTING, in_a_copy


def names(training: ShortTraining) -> list[str]:
    return [path.name for path in CheckpointDir(training.directory / "saved").checkpoints]


@pytest.fixture(scope="module")
def four_steps(training: ShortTraining, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what four steps of the training have written."""
    training.run(steps=4)
    copy = tmp_path_factory.mktemp("four steps")
    for name in ("out", "saved"):
        shutil.copytree(training.directory / name, copy / name)
    return copy


@pytest.fixture
def stopped(training: ShortTraining, four_steps: Path) -> ShortTraining:
    """The training after four steps."""
    for name in ("out", "saved"):
        shutil.rmtree(training.directory / name, ignore_errors=True)
        shutil.copytree(four_steps / name, training.directory / name)
    return training


def test_a_second_call_resumes_and_a_third_has_nothing_to_do(stopped: ShortTraining, clean: Outcome) -> None:
    first = tuple(metrics.loss for metrics in read_steps(stopped.directory / "out"))
    second = stopped.run((), "--resume", "auto", fresh=False)
    third = stopped.run((), "--resume", "auto", fresh=False)
    assert (first, second.losses, third.losses) == (clean.losses[:4], clean.losses, clean.losses)
    assert names(stopped) == ["step-000010", "step-000009", "step-000006"]
    assert f"nothing left to train: {STEPS} steps were asked for, and are done" in third.output
    assert "nothing left" not in second.output


def test_data_that_ends_before_the_steps_is_reported(stopped: ShortTraining) -> None:
    model = (stopped.directory / "model.py").read_text()
    (stopped.directory / "few.py").write_text(model.replace("while True", "for _ in range(6)"))
    few = ("--data", "few.py:batches", "--resume", "auto")
    second = stopped.run((), *few, fresh=False)
    third = stopped.run((), *few, fresh=False)
    assert len(second.losses) == 6
    assert f"ended after step 6 of {STEPS}: the data has ended, or a stop was requested" in second.output
    assert "nothing left to train: the data has ended" in third.output
    assert f"ended after step 6 of {STEPS}: the data has ended\n" in third.output


def test_the_last_step_is_reported_although_earlier_ones_are_missing_in_the_log(stopped: ShortTraining) -> None:
    model = (stopped.directory / "model.py").read_text()
    (stopped.directory / "few.py").write_text(model.replace("while True", "for _ in range(6)"))
    written = stopped.directory / "out" / "steps.jsonl"
    first, _, _, last = written.read_text().splitlines()
    written.write_text(f"{first}\n{last}\n")
    resumed = stopped.run((), "--data", "few.py:batches", "--resume", "auto", fresh=False)
    assert "steps 2 to 3 are missing in" in resumed.output
    assert f"ended after step 6 of {STEPS}: the data has ended, or a stop was requested" in resumed.output


def test_the_same_command_resumes_with_the_same_plan(training: ShortTraining) -> None:
    ours = [word for word in COMMAND if word not in ("--plan", "plan.json")]
    options_of_plan = ("--ranks", "2", "--schedule", "1f1b", "--budget", "0")
    for name in ("out", "saved"):
        shutil.rmtree(training.directory / name, ignore_errors=True)
    first = training.call(*ours, *LASTING, *options_of_plan, "--steps", 3)
    second = training.call(*ours, *LASTING, *options_of_plan, "--steps", 5)
    other = training.call(*ours, *LASTING, *options_of_plan, "--schedule", "gpipe", "--steps", 6)
    assert [code for code, _ in (first, second, other)] == [0, 0, 0]
    text = "using the plan of the checkpoint"
    assert [text in output for _, output in (first, second, other)] == [False, True, False]


def test_another_number_of_ranks_keeps_the_number_of_microbatches(stopped: ShortTraining, clean: Outcome) -> None:
    ours = [word for word in COMMAND if word not in ("--plan", "plan.json")]
    code, output = stopped.call(*ours, *LASTING, "--ranks", 1, "--budget", 0, "--steps", STEPS)
    assert code == 0, output
    assert Run.load(stopped.directory / "out" / "run.json").plan.num_microbatches == 4
    assert stopped.run((), "--resume", "auto", fresh=False).losses == pytest.approx(clean.losses, rel=1e-6)


def test_a_checkpoint_of_another_model_is_refused_once(training: ShortTraining) -> None:
    training.run(steps=1)
    other = (training.directory / "model.py").read_text().replace("range(6)", "range(5)")
    (training.directory / "other.py").write_text(other)
    ours = [word.replace("model.py", "other.py") for word in COMMAND if word not in ("--plan", "plan.json")]
    code, output = training.call(*ours, *LASTING, "--ranks", 2, "--schedule", "1f1b", "--budget", 0)
    assert (code, "restart 1" in output) == (6, False)
    assert "do not match the names of the model" in output
    assert "unexpected: 5.0.weight, 5.0.bias" in output


def test_a_checkpoint_in_another_directory_is_resumed_from_by_its_path(stopped: ShortTraining, clean: Outcome) -> None:
    (stopped.directory / "saved").rename(stopped.directory / "elsewhere")
    found = stopped.run((), "--resume", "elsewhere/step-000003", fresh=False)
    assert found.losses[3:] == clean.losses[3:]


def test_a_damaged_checkpoint_is_skipped_with_a_warning(
    training: ShortTraining, clean: Outcome, tmp_path: Path
) -> None:
    training.run(steps=7)
    newest = CheckpointDir(training.directory / "saved").checkpoints[0] / "plan.json"
    newest.write_bytes(newest.read_bytes()[:-2])
    output = tmp_path / "output.txt"
    pid = in_a_copy(training.directory, output, *LASTING, "--steps", str(STEPS))
    assert os.waitpid(pid, 0)[1] == 0, output.read_text()
    assert "newer checkpoints are damaged and were skipped; training resumes from step-000006" in output.read_text()
    assert training.run((), "--resume", "auto", fresh=False).losses == clean.losses


def test_random_data_of_numpy_and_python_resumes_exactly(training: ShortTraining) -> None:
    (training.directory / "data.py").write_text(DATA)
    drawn = ("--data", "data.py:drawn")
    whole = training.run((), *drawn, steps=5)
    training.run((), *drawn, steps=2)
    assert len(whole.losses) == 5
    assert training.run((), *drawn, "--resume", "auto", fresh=False, steps=5).losses == whole.losses


def test_three_steps_in_a_row_that_are_not_finite_end_the_training(training: ShortTraining) -> None:
    (training.directory / "data.py").write_text(DATA)
    found = training.run((), "--data", "data.py:broken", "--every", 1)
    assert (found.exit_code, found.restarts, len(found.losses)) == (5, 0, 3)


def test_checkpoints_with_nan_do_not_replace_finite_ones_and_fail_again_when_resumed(training: ShortTraining) -> None:
    (training.directory / "data.py").write_text(DATA)
    options = ("--optimizer", "data.py:breaking", "--every", 1, "--keep", 2)
    found = training.run((), *options)
    assert (found.exit_code, len(found.losses)) == (5, 6)
    assert names(training) == ["step-000003", "step-000002"]
    again = training.run((), *options, "--resume", "auto", fresh=False)
    assert (again.exit_code, "3 steps in a row" in again.output) == (5, True)


def test_skipped_steps_before_a_stop_count_after_resuming(training: ShortTraining) -> None:
    (training.directory / "data.py").write_text(DATA)
    training.run((), "--data", "data.py:broken", steps=2)
    found = training.run((), "--data", "data.py:broken", "--resume", "auto", fresh=False)
    assert (found.exit_code, len(found.losses)) == (5, 3)


def test_a_damaged_step_log_does_not_prevent_resuming(stopped: ShortTraining, clean: Outcome) -> None:
    with (stopped.directory / "out" / "steps.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\n")
    assert stopped.run((), "--resume", "auto", fresh=False).losses == clean.losses


def test_changed_options_are_reported_and_take_effect(stopped: ShortTraining, clean: Outcome, tmp_path: Path) -> None:
    options = (*LASTING, "--steps", str(STEPS), "--lr", "0.5", "--clip", "1.0")
    assert os.waitpid(in_a_copy(stopped.directory, tmp_path / "output.txt", *options), 0)[1] == 0
    output = (tmp_path / "output.txt").read_text()
    assert "changed since it was saved: --lr 0.001 is now 0.5, --clip none is now 1.0" in output
    losses = [figures.loss for figures in read_steps(stopped.directory / "out")]
    assert losses[:5] == list(clean.losses[:5])
    assert abs(losses[6] - clean.losses[6]) > 1e-3


def test_a_run_with_nothing_left_to_do_stays_as_it_was_written(training: ShortTraining) -> None:
    training.run(steps=2)
    written = (training.directory / "out" / "run.json").read_text()
    training.run((), "--resume", "auto", fresh=False, steps=2)
    assert (training.directory / "out" / "run.json").read_text() == written
