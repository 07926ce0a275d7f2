"""Logs have every step once, also after a run resumes, and a log that cannot be written does not end the training."""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

import penstock
from penstock import PenstockError, RunError, TrainOptions
from penstock.api.step_logs import Csv, JsonLines, LineFile, StepLogs
from penstock.api.train_options import LogTarget
from penstock.ir import StepMetrics
from tests.plans import quick_plan
from tests.small_models import WIDTH, chain, noise


def metrics(step: int, **values: Any) -> StepMetrics:
    return StepMetrics(**{"step": step, "loss": 1.0 / (step + 1), "seconds": 0.5, "samples": 8, **values})


@pytest.fixture(params=[Csv, JsonLines])
def make(request: pytest.FixtureRequest) -> type[LineFile]:
    return request.param  # type: ignore[no-any-return]


def test_a_step_that_is_evaluated_has_one_line(make: type[LineFile], tmp_path: Path) -> None:
    log = make(tmp_path / "log")
    for each in (metrics(0, lr=0.1), metrics(1), metrics(1, eval_loss=0.25), metrics(2, loss=None)):
        log.write(each)
    assert log.read() == (metrics(0, lr=0.1), metrics(1, eval_loss=0.25), metrics(2, loss=None))


def test_a_run_that_resumes_replaces_later_steps_and_a_line_that_was_cut_off(
    make: type[LineFile], tmp_path: Path
) -> None:
    first = make(tmp_path / "log")
    for step in range(4):
        first.write(metrics(step))
    with first.path.open("a") as file:
        file.write("4,0.")
    second = make(tmp_path / "log")
    second.write(metrics(2, lr=0.5))
    assert second.read() == (metrics(0), metrics(1), metrics(2, lr=0.5))
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_a_number_that_was_cut_off_is_not_read(tmp_path: Path) -> None:
    log = Csv(tmp_path / "log.csv")
    log.write(metrics(0))
    log.write(metrics(1, eval_loss=0.125))
    log.path.write_text(log.path.read_text().removesuffix("25\n"))
    assert log.read() == (metrics(0),)


def test_a_log_that_cannot_be_written_is_dropped_with_a_message(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    logs = StepLogs([LogTarget("csv", str(tmp_path / "gone" / "log.csv")), LogTarget("csv", str(tmp_path / "log.csv"))])
    assert logs.write(metrics(0)) == []
    (tmp_path / "gone" / "log.csv").unlink()
    (message,) = logs.write(metrics(1))
    assert "STEPS ARE NO LONGER WRITTEN TO" in message
    assert logs.write(metrics(2)) == []
    assert [each.step for each in Csv(tmp_path / "log.csv").read()] == [0, 1, 2]


class FakeWandb(ModuleType):
    """The part of wandb that is used, with the calls that were made."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = ModuleSpec("wandb", None, origin="wandb")
        self.calls: list[Any] = []

    def init(self, **settings: Any) -> "FakeWandb":
        self.calls.append(settings)
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.calls.append((step, values))

    def finish(self) -> None:
        self.calls.append("finish")


def test_wandb_gets_every_number_once_under_the_id_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    logs = StepLogs(TrainOptions(log=["wandb:first"]).log_targets, "abc")
    for each in (metrics(4), metrics(4, eval_loss=0.5)):
        assert logs.write(each) == []
    logs.close()
    assert wandb.calls == [
        {"project": "first", "id": "abc", "resume": "allow"},
        (4, {"loss": 0.2, "seconds": 0.5, "samples": 8.0}),
        (4, {"eval_loss": 0.5}),
        "finish",
    ]


def test_logs_are_closed_after_an_error_and_never_opened_without_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    model, batch = chain(2), noise(4, WIDTH)
    plan = quick_plan(model, (batch,), ranks=2, microbatches=2, schedule="1f1b")
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, local=True)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)

    def fail_after_a_step(event: penstock.TrainEvent) -> None:
        if event.name == "after_step":
            raise ValueError("stop here")

    options = TrainOptions(steps=3, log=["wandb:first"])
    with pytest.raises(PenstockError, match="no batches"):
        penstock.fit(pipe, [], optimizer, options)
    assert wandb.calls == []
    with pytest.raises(ValueError, match="stop here"):
        penstock.fit(pipe, [(batch, batch)], optimizer, options, callbacks=[fail_after_a_step])
    assert [call for call in wandb.calls if call == "finish"] == ["finish"]
    assert wandb.calls[-1] == "finish"


def test_a_log_that_fails_at_the_end_neither_hides_an_error_nor_loses_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose_connection(self: FakeWandb) -> None:
        raise RuntimeError("connection lost")

    monkeypatch.setitem(sys.modules, "wandb", FakeWandb())
    monkeypatch.setattr(FakeWandb, "finish", lose_connection)
    model, batch = chain(2), noise(4, WIDTH)
    plan = quick_plan(model, (batch,), ranks=2, microbatches=2, schedule="1f1b")
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss, local=True)
    optimizer, options = torch.optim.SGD(pipe.parameters(), lr=0.1), TrainOptions(log=["wandb:first"])
    with pytest.warns(penstock.PenstockWarning, match="connection lost"):
        run = penstock.fit(pipe, [(batch, batch)], optimizer, options)
    assert len(run.steps) == 1

    def fail_after_a_step(event: penstock.TrainEvent) -> None:
        if event.name == "after_step":
            raise ValueError("stop here")

    with pytest.raises(ValueError, match="stop here"):
        penstock.fit(pipe, [(batch, batch)], optimizer, options, callbacks=[fail_after_a_step])


def test_a_log_that_fails_while_training_is_dropped_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    logs = StepLogs([LogTarget("wandb", "first")])
    assert logs.write(metrics(0)) == []
    monkeypatch.setattr(FakeWandb, "log", lambda self, values, step: {}["run"])
    (message,) = logs.write(metrics(1))
    assert "STEPS ARE NO LONGER WRITTEN TO first" in message
    assert logs.write(metrics(2)) == []


def test_wandb_that_does_not_start_is_an_error_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(FakeWandb, "init", lambda self, **settings: {}["api_key"])
    with pytest.raises(RunError, match="KeyError: 'api_key'") as caught:
        StepLogs([LogTarget("wandb", "first")]).write(metrics(0))
    assert "WANDB_MODE=offline" in str(caught.value)


def test_tensorboard_shows_the_steps_of_a_resumed_run_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps in (range(4), range(2, 5)):
        logs = StepLogs([LogTarget("tensorboard", str(tmp_path))])
        for step in steps:
            logs.write(metrics(step))
        logs.write(metrics(steps[-1], eval_loss=0.5))
        logs.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in events.Scalars("loss")] == [0, 1, 2, 3, 4]
    assert [event.step for event in events.Scalars("eval_loss")] == [4]


@pytest.mark.parametrize("kind", ["tensorboard", "wandb"])
def test_a_missing_package_is_named(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.api.train_options.find_spec", lambda name: None)
    with pytest.raises(PenstockError, match=f"try: pip install {kind}"):
        TrainOptions(log=[f"{kind}:first"])
