"""Help and version: at once, and without loading what they do not need."""

import resource
import subprocess
import sys

import pytest

import penstock
from penstock.cli import app

VERBS = (
    "demo",
    "doctor",
    "selftest",
    "capture",
    "plan",
    "explain",
    "simulate",
    "show",
    "check",
    "train",
    "why-hung",
    "what-if",
    "report",
    "trace",
)


def test_help_names_every_verb(call) -> None:
    output = call("--help").output
    assert all(f"\n  {verb} " in output for verb in VERBS)
    assert len(app.registered_commands) == len(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb: str, call) -> None:
    result = call(verb, "--help")
    assert f"Usage: penstock {verb}" in result.output.replace("Usage: root", "Usage: penstock")
    assert result.exit_code == 0


def test_every_verb_that_prints_data_can_print_json(call) -> None:
    assert all("--json" in call(verb, "--help").output for verb in VERBS)


def test_the_version_is_that_of_the_package(call) -> None:
    assert call("--version").output == f"penstock {penstock.__version__}\n"


def test_without_a_verb_help_is_shown(call) -> None:
    assert "Commands:" in call().output


def test_help_loads_neither_torch_nor_a_library_for_drawing() -> None:
    command = [sys.executable, "-X", "importtime", "-c", "from penstock.cli import main; main()", "--help"]
    result = subprocess.run(command, capture_output=True, text=True)
    loaded = {line.split("|")[-1].strip() for line in result.stderr.splitlines()}
    assert "penstock.cli.simulate" in loaded
    assert not loaded & {"torch", "matplotlib", "jinja2", "networkx", "rich.console"}


def test_help_answers_at_once() -> None:
    # The aim is 0.3 s. Seconds of the processor are counted, and generously, so that a busy machine does not matter.
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", "from penstock.cli import main; main()", "--help"], capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.5
