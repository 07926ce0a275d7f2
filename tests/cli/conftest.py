"""Fixtures of the tests of the command line: calls of it, files, and a short training."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from penstock.cli import app

if TYPE_CHECKING:
    from benchmarks.short_training import Outcome, ShortTraining

Call = Callable[..., Any]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """`call("check", path)` runs the command in an empty directory; the result has .output and .exit_code."""
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
def training() -> Iterator["ShortTraining"]:
    from benchmarks.short_training import ShortTraining  # which loads torch

    with ShortTraining.made(2) as made:
        yield made


@pytest.fixture(scope="session")
def clean(training: "ShortTraining") -> "Outcome":
    """The outcome of a training without faults."""
    return training.run()
