"""What the tests of the command line share: a way to call it, and orders in files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

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
