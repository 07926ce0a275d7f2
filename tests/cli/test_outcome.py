"""Outcome: how a command ends when its work cannot be done."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from penstock.cli.outcome import explained

COMMAND = [sys.executable, "-c", "from penstock.cli import main; main()"]


def test_a_full_disk_ends_with_5_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as end, explained():
        raise OSError(28, "No space left on device", "a.svg")
    assert end.value.exit_code == 5
    assert capsys.readouterr().err == "no space left on device (file: a.svg)\n"


def test_an_interrupt_ends_with_130_and_one_word(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as end, explained():
        raise KeyboardInterrupt
    assert end.value.exit_code == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_mistake_of_ours_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError), explained():
        print(1 // 0)


def test_ctrl_c_in_the_middle_of_work_leaves_no_traceback_and_no_file(tmp_path: Path) -> None:
    program = "from penstock.cli import main; print('ready', flush=True); main()"
    large = ["simulate", "all", "--ranks", "64", "--microbatches", "4096", "--svg", "a.svg"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program, *large], cwd=tmp_path, text=True, **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert errors == "interrupted\n"
    assert process.returncode == 130
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_goes_away_leaves_no_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    result = subprocess.run([*COMMAND, "simulate", "--json"], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert "Traceback" not in result.stderr
