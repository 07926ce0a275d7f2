"""A bar is shown on a terminal only, and only for what takes its time."""

import io
import sys

import pytest

from penstock.api import progress as progress_file
from penstock.api.progress import progress


class Terminal(io.StringIO):
    """A screen that keeps what is written to it."""

    def isatty(self) -> bool:
        """It is one."""
        return True


def shown(monkeypatch: pytest.MonkeyPatch, screen: io.StringIO, patience: float, wanted: bool | None = None) -> str:
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(progress_file, "_PATIENCE_SECONDS", patience)
    monkeypatch.setenv("TERM", "xterm")
    with progress("measuring", wanted) as tell:
        tell(1, 3)
        tell(3, 3)
    return screen.getvalue()


def test_what_takes_long_is_shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch):
    assert "measuring" in shown(monkeypatch, Terminal(), 0.0)


def test_what_is_soon_done_is_not(monkeypatch: pytest.MonkeyPatch):
    assert shown(monkeypatch, Terminal(), 60.0) == ""


def test_nothing_is_written_to_a_file(monkeypatch: pytest.MonkeyPatch):
    assert shown(monkeypatch, io.StringIO(), 0.0) == ""


def test_it_can_be_silenced(monkeypatch: pytest.MonkeyPatch):
    assert shown(monkeypatch, Terminal(), 0.0, wanted=False) == ""


def failing(screen: Terminal) -> None:
    with progress("measuring") as tell:
        tell(1, 2)
        screen.truncate(0)
        raise ValueError("broken")


def test_the_bar_is_taken_away_when_the_work_fails(monkeypatch: pytest.MonkeyPatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(progress_file, "_PATIENCE_SECONDS", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    with pytest.raises(ValueError, match="broken"):
        failing(screen)
    assert "\x1b[?25h" in screen.getvalue()  # the cursor is back
