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


def shown(monkeypatch: pytest.MonkeyPatch, screen: io.StringIO, delay: float, show: bool | None = None) -> str:
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(progress_file, "_DELAY_SECONDS", delay)
    monkeypatch.setenv("TERM", "xterm")
    with progress("measuring", show) as update:
        update(1, 3)
        update(3, 3)
    return screen.getvalue()


def test_progress_of_slow_work_is_shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch):
    assert "measuring" in shown(monkeypatch, Terminal(), 0.0)


def test_progress_of_fast_work_is_not_shown(monkeypatch: pytest.MonkeyPatch):
    assert shown(monkeypatch, Terminal(), 60.0) == ""


def test_nothing_is_written_to_a_file(monkeypatch: pytest.MonkeyPatch):
    assert shown(monkeypatch, io.StringIO(), 0.0) == ""


def test_it_can_be_silenced(monkeypatch: pytest.MonkeyPatch):
    assert shown(monkeypatch, Terminal(), 0.0, show=False) == ""


def failing(screen: Terminal) -> None:
    with progress("measuring") as update:
        update(1, 2)
        screen.truncate(0)
        raise ValueError("broken")


def test_the_bar_is_taken_away_when_the_work_fails(monkeypatch: pytest.MonkeyPatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(progress_file, "_DELAY_SECONDS", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    with pytest.raises(ValueError, match="broken"):
        failing(screen)
    assert "\x1b[?25h" in screen.getvalue()  # the cursor is back
