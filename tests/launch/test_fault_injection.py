"""Faults are read from text and refused unless the environment allows them."""

import pytest

from penstock.errors import PenstockError
from penstock.launch import ALLOW_VARIABLE, parse_faults
from penstock.launch.fault_injection import Fault

READ = {
    "kill,rank=1,step=5,action=3": Fault("kill", 1, step=5, action=3),
    "abort,save=7": Fault("abort", save=7),
    "raise,rank=2,after=1.5,attempt=every": Fault("raise", 2, after=1.5, attempt=None),
    "slow,rank=1,step=0,seconds=0.25,attempt=2": Fault("slow", 1, step=0, seconds=0.25, attempt=2),
}
WRONG = {
    "kil,step=1": "unknown fault",
    "kill": "exactly one of",
    "kill,step=1,save=2": "exactly one of",
    "kill,step=-1": "0 or more",
    "full-disk,after=1": "step of a checkpoint",
    "kill,step=one": "must be numbers",
    "raise,after=nan": "0 or more",
    "slow,step=1": "seconds must be given",
    "slow,step=1,seconds=-1": "0 or more",
    "kill,step=1,seconds=2": "only for it",
    "kill,step=1,step=2": "same key twice",
    "kill,stage=1": "unknown keys",
    "": "unknown fault",
}


@pytest.mark.parametrize(("text", "fault"), READ.items(), ids=READ)
def test_a_fault_is_read(text: str, fault: Fault) -> None:
    assert Fault.parse(text) == fault


@pytest.mark.parametrize(("text", "problem"), WRONG.items(), ids=WRONG)
def test_an_invalid_fault_is_refused(text: str, problem: str) -> None:
    with pytest.raises(PenstockError, match=problem):
        Fault.parse(text)


def test_faults_are_refused_unless_the_environment_allows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALLOW_VARIABLE, raising=False)
    assert parse_faults(()) == ()
    with pytest.raises(PenstockError, match=ALLOW_VARIABLE):
        parse_faults(["kill,step=1"])
    monkeypatch.setenv(ALLOW_VARIABLE, "1")
    assert parse_faults(["kill,step=1"]) == (Fault("kill", step=1),)


def test_a_fault_applies_to_one_rank_in_one_attempt_or_in_all() -> None:
    assert [Fault("kill", 1, step=5, attempt=1).applies_to(*place) for place in ((1, 1), (0, 1), (1, 0))] == [
        True,
        False,
        False,
    ]
    assert Fault("kill", 1, step=5, attempt=None).applies_to(1, 7)
