"""Outcome: how a command ends when its work cannot be done."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from penstock.cli.output import exit_on_error
from penstock.errors import PenstockError

COMMAND = [sys.executable, "-c", "from penstock.cli import main; main()"]
STOPPED = """
import runpy, sys
class Stop:
    def find_spec(name, path, target=None):
        if name == module:
            sys.meta_path.remove(Stop)  # one ctrl-c
            raise KeyboardInterrupt
module = sys.argv.pop(1)
sys.meta_path.insert(0, Stop)
runpy.run_module("penstock", run_name="__main__")
"""


def test_a_full_disk_ends_with_5_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as end, exit_on_error():
        raise OSError(28, "No space left on device", "a.svg")
    assert end.value.exit_code == 5
    assert capsys.readouterr().err == "no space left on device (file: a.svg)\n"


def test_a_warning_has_no_line_of_code() -> None:
    program = "import warnings; from penstock.errors import PenstockWarning; from penstock.cli import main\n"
    program += "import typer; typer.echo = lambda *a, **k: warnings.warn('not stored', PenstockWarning)\n"
    program += "import sys; sys.argv = ['penstock', '--version']; main()"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert found.stderr == "warning: not stored\n"


def test_an_interrupt_ends_with_130_and_one_word(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as end, exit_on_error():
        raise KeyboardInterrupt
    assert end.value.exit_code == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(
    ("hint", "shown"),
    [
        ("stages_per_rank=2, or basic_blocks=Layer, or other=3", "--stages-per-rank 2, or --block Layer, or other=3"),
        ("vocabulary_shards=None, or shard_optimizer=True", "no --vocabulary-shards, or --shard-optimizer"),
        ("10e9, or None for infinite", "10e9, or leave it out for infinite"),
    ],
)
def test_hints_are_spelled_as_commands(hint: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), exit_on_error():
        raise PenstockError("too few", hint=hint)
    assert capsys.readouterr().err == f"too few\ntry: {shown}\n"


def test_the_package_can_be_run() -> None:
    result = subprocess.run([sys.executable, "-m", "penstock", "--version"], capture_output=True, text=True)
    assert result.stdout.startswith("penstock ")


@pytest.mark.parametrize(
    ("module", "verb"),
    [
        ("typer", "simulate"),
        ("penstock.cli.demo", "simulate"),
        ("penstock.api", "simulate"),
        ("numpy", "simulate"),
        ("numpy", "demo"),  # imports torch before any module that imports numpy
    ],
)
def test_ctrl_c_while_modules_load_leaves_no_traceback(module: str, verb: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", STOPPED, module, verb]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.stderr == "interrupted\n"
    assert result.returncode == 130


def test_a_mistake_of_ours_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError), exit_on_error():
        print(1 // 0)


def test_ctrl_c_in_the_middle_of_work_leaves_no_traceback_and_no_file(tmp_path: Path) -> None:
    # Whoever runs the tests in the background has told its children to ignore ctrl-c.
    listen = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    working = "lower = penstock.lower; penstock.lower = lambda *args: (print('ready', flush=True), lower(*args))[1]"
    program = f"{listen}; import penstock; {working}; from penstock.cli import main; main()"
    large = ["simulate", "all", "--ranks", "64", "--microbatches", "4096", "--svg", "a.svg"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program, *large], cwd=tmp_path, text=True, **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=240)
    assert errors == "interrupted\n"
    assert process.returncode == 130
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_goes_away_leaves_no_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    result = subprocess.run([*COMMAND, "simulate", "--json"], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert "Traceback" not in result.stderr
