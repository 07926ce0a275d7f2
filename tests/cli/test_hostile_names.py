"""Names of a model that would control a terminal are printed harmlessly by every verb, in a pipe and on a terminal."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from penstock.checkpoint.manifest import document_with_digest
from penstock.cli import app

# Title, screen, hyperlink, C1 control sequence, carriage return, bell, backspace, and changes of direction.
HOSTILE = ("\x1b]0;pwn\x07", "\x1b[2J", "\x1b]8;;http://x\x1b\\", "\x9b2J", "\r", "\x08", "\x85", "\u202e", "\u2066")
RUN = os.fsdecode(b"run\xff")  # a directory whose name is not UTF-8
NAMES = [f"a{text}[bold]b" for text in HOSTILE]
MODEL = f"""\
import torch
from torch import nn

NAMES = {NAMES!r}

def build():
    model = nn.Sequential()
    for name in NAMES:
        model.add_module(name, nn.Linear(4, 4))
    return model, torch.ones(4, 4)

def batches():
    while True:
        yield torch.randn(4, 4), torch.randn(4, 4)
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model, its plan, a run and its checkpoint, all with hostile names."""
    root = tmp_path_factory.mktemp("hostile")
    (root / "model.py").write_text(MODEL, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        options = ("--ranks", "2", "--microbatches", "2", "--schedule", "gpipe", "--budget", "0", "--out", "plan.json")
        harmless("plan", "model.py:build", *options)
        training = ("--data", "model.py:batches", "--loss", "mse_loss", "--plan", "plan.json", "--steps", "1")
        harmless("train", "model.py:build", *training, "--checkpoint", "saved", "--out", RUN)
    return root


@pytest.fixture(params=["a pipe", "a terminal"])
def screen(request: pytest.FixtureRequest, directory: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(directory)
    if request.param == "a terminal":
        monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich print as on a terminal
    return str(request.param)


def harmless(*arguments: str, code: int = 0) -> Result:
    """The result of a command whose output has no hostile sequence."""
    # With color, or click would remove escape sequences from the output of the test.
    result = CliRunner().invoke(app, arguments, color=True)
    assert result.exit_code == code, (arguments, result.output)
    assert [text for text in (*HOSTILE, "\x1b]", "\x07") if text in result.output] == [], arguments
    return result


PLAN_VERBS = [
    ("capture", "model.py:build"),
    ("check", "plan.json"),
    ("check", "plan.json", "--model", "model.py:build"),
    ("explain", "plan.json"),
    ("explain", "plan.json", "--json"),
    ("simulate", "plan.json"),
    ("show", "plan.json"),
    ("show", "plan.json", "--json"),
    ("show", f"{RUN}/run.json"),
    *(("show", f"{RUN}/run.json", "--view", view) for view in ("terminal", "table", "timeline", "memory", "chrome")),
    *(("show", "plan.json", "--view", view) for view in ("outline", "cuts", "model", "report")),
    ("report", RUN, "--out", "page.html"),
    ("trace", f"{RUN}/run.json", "trace.json"),
    ("what-if", f"{RUN}/run.json", "--budget", "0"),
    ("plan", "model.py:build", "--ranks", "2", "--microbatches", "2", "--budget", "0"),
    ("why-hung", RUN),
]


def test_every_verb_prints_names_harmlessly(screen: str) -> None:
    for arguments in PLAN_VERBS:
        # The other verbs print the same on a terminal.
        if screen == "a pipe" or arguments[0] in ("capture", "show", "simulate"):
            harmless(*arguments, code=2 if arguments[0] == "why-hung" else 0)


def test_checkpoints_are_printed_harmlessly(screen: str, directory: Path) -> None:
    for verb in ("ls", "verify", "show"):
        shown = harmless("ckpt", verb, "saved").output
    assert "a?]0;pwn?[bold]b.weight" in shown.replace("\n", "")
    path = directory / "saved" / "step-000001" / "manifest.json"
    original = path.read_bytes()
    manifest = json.loads(original)["manifest"]
    changes = [
        {"written": NAMES[0]},
        {"plan": manifest["plan"] | {"schedule": "".join(HOSTILE)}},
        {NAMES[1]: 1},
        {"files": {NAMES[2]: {"bytes": 1, "sha256": "0" * 64, "rank": 0}}},
        {"versions": {NAMES[0]: NAMES[1]}},
    ]
    try:
        for change in changes:
            path.write_bytes(document_with_digest(manifest | change))
            for verb in ("ls", "verify", "show"):
                result = CliRunner().invoke(app, ["ckpt", verb, "saved"], color=True)
                assert [text for text in (*HOSTILE, "\x1b]", "\x07") if text in result.output] == [], (change, verb)
    finally:
        path.write_bytes(original)


def test_errors_print_names_harmlessly(screen: str, directory: Path) -> None:
    plan = json.loads((directory / "plan.json").read_text())
    plan["value"][NAMES[0]] = 1
    (directory / "bad.json").write_text(json.dumps(plan))
    for verb in ("check", "explain", "show", "simulate", "report"):
        assert "?" in harmless(verb, "bad.json", code=2).output
