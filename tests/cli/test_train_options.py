"""The options of train, together: the numbers of a plain loop, on replicas and after a resume; and mistakes."""

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

from penstock.api.step_logs import Csv
from penstock.ir import Run, seconds_text

FILE = """\
import torch
from torch import nn

def build():
    return nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)]), torch.ones(8, 4)

def batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(11):
        yield torch.randn(8, 4, generator=generator), torch.randn(8, 4, generator=generator)

def held_out():
    generator = torch.Generator().manual_seed(2)
    for size in (8, 3):
        yield torch.randn(size, 4, generator=generator), torch.randn(size, 4, generator=generator)

def note(event):
    if event.pipe.is_first:
        with open("events.txt", "a") as file:
            print(event.name, event.step, file=file)

def stop(event):
    note(event)
    if event.name == "after_step" and event.step == 2:
        event.stop()

def fail(event):
    raise KeyError("nothing")
"""
STEPS, RATE = 6, 0.1
TRAIN = ("train", "model.py:build", "--data", "model.py:batches", "--loss", "mse_loss", "--optimizer", "sgd")
PLAN = ("--ranks", "2", "--microbatches", "2", "--schedule", "1f1b", "--budget", "0", "--lr", RATE, "--steps", STEPS)
MISTAKES = {
    "precision": (("--precision", "int8"), 2, "try: --precision fp32"),
    "schedule": (("--lr-schedule", "cosin"), 2, "try: --lr-schedule cosine"),
    "warmup": (("--lr-schedule", "linear", "--warmup", "6"), 2, "warmup must be shorter than steps"),
    "log": (("--log", "text:x"), 2, "try: csv:FILE, tensorboard:DIRECTORY or wandb:PROJECT"),
    "log of another file": (("--log", "csv:model.py"), 5, "the log file has other columns"),
    "callback": (("--callback", "model.py:stopp"), 2, "did you mean stop?"),
    "a callback that breaks": (("--callback", "model.py:fail"), 5, "the function fail failed at before_step"),
    "eval data": (("--eval-data", "model.py:held"), 2, "did you mean held_out?"),
    "eval without data": (("--eval-every", "2"), 2, "try: --eval-data FILE.py:FUNCTION"),
    "a budget without lengths": (("--budget-tokens", "64"), 5, "a mask or labels that show the length of every sample"),
    "more replicas than samples": (("--replicas", "9"), 2, "try: --replicas 8, or a batch with more samples"),
    "a device of another kind": (("--device", "tpu"), 2, "try: --device cpu or --device cuda"),
    "a device of plan": (("--device", "h100"), 2, "--device of `penstock plan` names a device to predict for"),
    "no GPU": (("--device", "cuda"), 2, "device must be one of this machine (got: cuda, found: cpu)"),
    "replicas and fewer ranks": (
        ("--replicas", "2", "--checkpoint", "saved", "--min-ranks", "1"),
        2,
        "--min-ranks does not combine with --replicas",
    ),
}


@pytest.fixture(autouse=True)
def _file(written: Callable[[str, str], Path]) -> None:
    written("model.py", FILE)


@pytest.mark.parametrize(("options", "code", "text"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_message(
    call, options: tuple[str, ...], code: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: None)
    result = call(*TRAIN, *PLAN, *options)
    assert text in result.output
    assert "Traceback" not in result.output
    assert result.exit_code == code


def plain_rows(file: Path) -> list[tuple[float, float, float, float | None]]:
    """Loss, norm, rate and evaluation of the same training in one process."""
    values = runpy.run_path(str(file))
    torch.manual_seed(0)
    model, _ = values["build"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    schedule = transformers.get_scheduler("cosine", optimizer, 2, STEPS)
    data, rows = list(values["batches"]()), []
    for number in range(STEPS):
        group = data[2 * number : 2 * number + 2]  # the last one has a single batch
        optimizer.zero_grad()
        losses = [functional.mse_loss(model(x), y) / len(group) for x, y in group]
        sum(losses).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.2).item()
        rate = schedule.get_last_lr()[0]
        optimizer.step()
        schedule.step()
        evaluated = None
        if number + 1 in (2, 3, 4, STEPS):
            with torch.no_grad():
                pairs = [(functional.mse_loss(model(x), y).item(), len(x)) for x, y in values["held_out"]()]
            evaluated = sum(loss * size for loss, size in pairs) / 11
        rows.append((sum(losses).item(), norm, rate, evaluated))
    return rows


def test_all_options_on_replicas_with_a_resume_are_a_plain_loop(call, tmp_path: Path) -> None:
    schedule = ("--lr-schedule", "cosine", "--warmup", "2", "--clip", "0.2", "--accumulate", "2")
    others = ("--eval-data", "model.py:held_out", "--eval-every", "2", "--log", "csv:log.csv", "--out", "run")
    command = (*TRAIN, *PLAN, *schedule, *others, "--checkpoint", "saved", "--every", "2", "--resume", "auto")
    first = call(*command, "--replicas", "2", "--callback", "model.py:stop")
    assert first.exit_code == 0, first.output
    second = call(*command, "--callback", "model.py:note")
    assert second.exit_code == 0, second.output
    run = Run.load(tmp_path / "run" / "run.json")
    steps = run.steps
    assert f"{seconds_text(2 * run.plan.predicted.makespan)} predicted" in second.output
    assert Csv(tmp_path / "log.csv").read() == steps
    assert [metrics.step for metrics in steps] == list(range(STEPS))
    for metrics, expected in zip(steps, plain_rows(tmp_path / "model.py"), strict=True):
        found = (metrics.loss, metrics.grad_norm, metrics.lr, metrics.eval_loss)
        assert [value is None for value in found] == [value is None for value in expected]
        assert [value or 0.0 for value in found] == pytest.approx([value or 0.0 for value in expected], rel=1e-5)
    events = (tmp_path / "events.txt").read_text().splitlines()
    assert [event for event in events if event.startswith(("save", "end"))] == [
        "save 1",
        "save 2",
        "end 3",
        "save 3",
        "save 5",
        "end 6",
    ]
    assert "eval loss" in second.output
