"""A loop that saves on the way resumes with the losses it would have had."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock import StepReport, TrainOptions
from penstock.checkpoint import BackgroundWriter, CheckpointOptions, Saver, writer
from penstock.errors import CheckpointError, RunError
from penstock.ir import Plan


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2)) for _ in range(4)))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return penstock.plan(
        model(), (torch.ones(4, 4),), ranks=2, microbatches=2, schedule="1f1b", budget_seconds=0.0, loss_fn=nn.MSELoss()
    )


def batches() -> Iterator[Any]:
    """Shuffled and drawn at random, as data often is."""
    order = torch.randperm(40)
    for number in order:
        yield torch.randn(4, 4) + number, torch.randn(4, 4)


class Trained:
    """A training loop in one process, with its step reports."""

    def __init__(
        self, plan: Plan, steps: int, options: CheckpointOptions | None = None, data: Any = None, **settings: Any
    ) -> None:
        pipe = penstock.Pipeline(model(), plan, loss_fn=nn.MSELoss(), local=True)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        self.reports: list[StepReport] = []
        self.run = penstock.fit(
            pipe,
            batches() if data is None else data,
            optimizer,
            TrainOptions(steps=steps, clip=1.0),
            checkpoints=options,
            on_step=self.reports.append,
            **settings,
        )


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_it_saves_on_the_way_and_at_the_end_and_keeps_the_newest(plan: Plan, tmp_path: Path) -> None:
    Trained(plan, 11, CheckpointOptions(tmp_path, every=4, keep=2))
    assert names(tmp_path) == ["step-000008", "step-000011"]


def test_a_resumed_training_has_the_losses_of_an_uninterrupted_one(plan: Plan, tmp_path: Path) -> None:
    whole = Trained(plan, 9)
    Trained(plan, 4, CheckpointOptions(tmp_path, every=100))
    later = Trained(plan, 9, CheckpointOptions(tmp_path, every=100, resume=tmp_path))
    assert [metrics.step for metrics in later.run.steps] == [4, 5, 6, 7, 8]
    assert later.run.losses == whole.run.losses[4:]
    assert later.reports[0].notes == (f"resumed from {tmp_path / 'step-000004'}, after step 4",)


def test_a_data_function_is_called_with_the_index_of_the_first_batch(plan: Plan, tmp_path: Path) -> None:
    asked = []

    def data(start: int) -> Iterator[Any]:
        asked.append(start)
        return iter([(torch.ones(4, 4), torch.ones(4, 4))] * 9)

    Trained(plan, 3, CheckpointOptions(tmp_path, every=100), data)
    Trained(plan, 5, CheckpointOptions(tmp_path, every=100, resume=tmp_path), data)
    assert asked == [0, 3]


def test_a_finished_training_stays_finished(plan: Plan, tmp_path: Path) -> None:
    Trained(plan, 3, CheckpointOptions(tmp_path))
    again = Trained(plan, 3, CheckpointOptions(tmp_path, resume=tmp_path))
    assert again.run.steps == ()
    assert names(tmp_path) == ["step-000003"]


def test_training_continues_with_a_note_if_a_checkpoint_cannot_be_written(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: penstock.Pipeline, *args: Any, **kwargs: Any) -> Path:
        if self.num_steps == 4:
            raise CheckpointError("the checkpoint could not be written", reason="No space left on device")
        return save(self, *args, **kwargs)

    save = penstock.Pipeline.save
    monkeypatch.setattr(penstock.Pipeline, "save", full)
    trained = Trained(plan, 6, CheckpointOptions(tmp_path, every=2))
    (note,) = trained.reports[3].notes
    assert "CHECKPOINT OF STEP 4 NOT WRITTEN, training continues; the newest is that of step 2" in note
    assert "No space left on device" in note
    assert names(tmp_path) == ["step-000002", "step-000006"]


def test_a_last_checkpoint_that_cannot_be_written_is_an_error(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: penstock.Pipeline, *args: Any, **kwargs: Any) -> Path:
        raise CheckpointError("the checkpoint could not be written", reason="No space left on device")

    monkeypatch.setattr(penstock.Pipeline, "save", full)
    with pytest.raises(RunError, match=r"the last checkpoint was not written.*newest: none"):
        Trained(plan, 3, CheckpointOptions(tmp_path, every=2))


@pytest.mark.parametrize("wrong", [{"every": 0}, {"keep": 0}])
def test_counts_must_be_positive(wrong: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="must be a positive integer"):
        CheckpointOptions(tmp_path, **wrong)


@pytest.mark.parametrize("is_seen_by_a_step", [True, False])
def test_training_continues_if_an_asynchronous_save_fails(
    is_seen_by_a_step: bool, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, *rest: Any) -> Any:
        if "-000004-" in str(path):
            raise OSError(28, "No space left on device")
        return written(path, *rest)

    def begun(self: BackgroundWriter, work: Any) -> None:
        start(self, work)
        if is_seen_by_a_step:
            self.wait()

    written, start = writer.write_file, BackgroundWriter.start
    monkeypatch.setattr(writer, "write_file", full)
    monkeypatch.setattr(BackgroundWriter, "start", begun)
    if not is_seen_by_a_step:
        # Otherwise that would be a matter of luck: the thread may be faster than the next step.
        monkeypatch.setattr(Saver, "check", lambda self, request: None)
    trained = Trained(plan, 7, CheckpointOptions(tmp_path, every=2, asynchronous=True))
    (report,) = [each for each in trained.reports if each.notes]
    assert report.metrics.step == (4 if is_seen_by_a_step else 5)
    assert "CHECKPOINT OF STEP 4 NOT WRITTEN, training continues; the newest is that of step 2" in report.notes[0]
    assert trained.run.losses == Trained(plan, 7).run.losses
    assert names(tmp_path) == ["step-000002", "step-000006", "step-000007"]


def test_a_last_asynchronous_save_that_fails_is_an_error(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "write_file", full)
    with pytest.raises(RunError, match=r"the last checkpoint was not written.*No space left.*newest: none"):
        Trained(plan, 2, CheckpointOptions(tmp_path, every=2, asynchronous=True))


def test_a_step_that_fails_for_another_reason_is_not_repeated(plan: Plan, tmp_path: Path) -> None:
    data = [(torch.ones(4, 4), torch.ones(4, 4))] * 2 + [(torch.ones(4, 3), torch.ones(4, 4))]
    with pytest.raises(penstock.PenstockError, match="the model cannot be run on this batch"):
        Trained(plan, 3, CheckpointOptions(tmp_path, every=9, asynchronous=True), data)


def test_a_step_is_logged_before_it_is_saved(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[int] = []

    def killed(self: penstock.Pipeline, *args: Any, **kwargs: Any) -> Path:
        save(self, *args, **kwargs)
        raise KeyboardInterrupt  # whatever ends a rank as soon as its checkpoint is there

    save = penstock.Pipeline.save
    monkeypatch.setattr(penstock.Pipeline, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        Trained(
            plan,
            6,
            CheckpointOptions(tmp_path, every=4),
            callbacks=[lambda event: noted.append(event.step) if event.name == "after_step" else None],
        )
    assert names(tmp_path) == ["step-000004"]
    assert noted == [0, 1, 2, 3]


@pytest.mark.parametrize("position", [None, 7, {"epoch": 1}, {"batches": "two"}, {"batches": -1}])
def test_a_checkpoint_without_a_count_of_batches_had_one_per_step(
    position: Any, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def saved(self: penstock.Pipeline, *args: Any, **kwargs: Any) -> Path:
        return save(self, *args, **{**kwargs, "position": position})

    save = penstock.Pipeline.save
    monkeypatch.setattr(penstock.Pipeline, "save", saved)
    Trained(plan, 3, CheckpointOptions(tmp_path))
    assert Trained(plan, 5, CheckpointOptions(tmp_path, resume=tmp_path)).run.losses == Trained(plan, 5).run.losses[3:]
