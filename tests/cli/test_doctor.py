"""doctor lists what this machine has; every warning comes with a hint."""

import json

import pytest

from penstock.api import doctor
from penstock.api.doctor import Finding
from penstock.errors import RunError


def test_every_check_is_listed(call) -> None:
    result = call("doctor", "--json")
    found = {each["name"]: each for each in json.loads(result.stdout)}
    machine = ["python", "torch", "backends", "cores", "memory", "threads"]
    assert list(found) == [*machine, "launch", "messages", "all-reduce"]
    assert "gloo" in found["backends"]["value"]
    assert "local ranks" in found["all-reduce"]["value"]
    assert result.exit_code == 0


def test_a_warning_comes_with_its_hint(call, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Finding("threads", "8", "too many", "export OMP_NUM_THREADS=1")]
    monkeypatch.setattr(doctor, "diagnosis", lambda _: found)
    output = call("doctor").stdout
    assert "| threads | " in output
    assert "warning: threads: too many\ntry: export OMP_NUM_THREADS=1" in output


def test_an_unlimited_number_of_threads_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    found = {each.name: each for each in _without_processes(monkeypatch)}
    assert found["threads"].hint == "export OMP_NUM_THREADS=1"
    assert not found["cores"].warning


def test_one_core_and_little_memory_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    monkeypatch.setattr("os.sysconf", lambda name: 1 if name == "SC_PAGE_SIZE" else 2**20)
    found = {each.name: each for each in _without_processes(monkeypatch)}
    assert found["cores"].warning
    assert found["memory"].value == "1 MiB"
    assert found["memory"].warning


def test_processes_that_cannot_connect_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    last = list(_without_processes(monkeypatch))[-1]
    assert last.name == "loopback"
    assert last.warning == "no socket"
    assert last.hint


def _without_processes(monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    def refused(*_: object) -> None:
        raise RunError("no socket")

    monkeypatch.setattr(doctor, "launch", refused)
    return list(doctor.diagnosis())
