"""What the tests of the command line share: a way to call it, orders in files, and a short training."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.short_training import Outcome, ShortTraining
from penstock.cli import app

Call = Callable[..., Any]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """`call("check", path)` runs the command in an empty directory; .output and .exit_code say what came of it."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str, str], Path]:
    """`written("name", "text")` is the path of a file with the text."""

    def write(name: str, text: str) -> Path:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path / name

    return write


@pytest.fixture(scope="session")
def training() -> Iterator[ShortTraining]:
    with ShortTraining.made(2) as made:
        yield made


@pytest.fixture(scope="session")
def clean(training: ShortTraining) -> Outcome:
    """What it comes to if nothing happens."""
    return training.run()
