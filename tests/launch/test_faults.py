"""Faults in words, and that they are refused unless they are allowed."""

import pytest

from penstock.errors import PenstockError
from penstock.launch import allowed
from penstock.launch.faults import ALLOWED, Fault

READ = {
    "kill,rank=1,step=5,action=3": Fault("kill", 1, step=5, action=3),
    "abort,save=7": Fault("abort", save=7),
    "raise,rank=2,after=1.5,life=every": Fault("raise", 2, after=1.5, life=None),
    "slow,rank=1,step=0,seconds=0.25,life=2": Fault("slow", 1, step=0, seconds=0.25, life=2),
}
WRONG = {
    "kil,step=1": "unknown fault",
    "kill": "one moment",
    "kill,step=1,save=2": "one moment",
    "kill,step=-1": "0 or more",
    "full-disk,after=1": "number of a checkpoint",
    "kill,step=one": "needs numbers",
    "raise,after=nan": "0 or more",
    "slow,step=1": "needs seconds",
    "slow,step=1,seconds=-1": "0 or more",
    "kill,step=1,seconds=2": "no other, needs seconds",
    "kill,step=1,step=2": "twice",
    "kill,stage=1": "unknown words",
    "": "unknown fault",
}


@pytest.mark.parametrize(("text", "fault"), READ.items(), ids=READ)
def test_a_fault_is_read(text: str, fault: Fault) -> None:
    assert Fault.parse(text) == fault


@pytest.mark.parametrize(("text", "problem"), WRONG.items(), ids=WRONG)
def test_what_is_no_fault_is_refused(text: str, problem: str) -> None:
    with pytest.raises(PenstockError, match=problem):
        Fault.parse(text)


def test_faults_are_refused_unless_the_environment_allows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALLOWED, raising=False)
    assert allowed(()) == ()
    with pytest.raises(PenstockError, match=ALLOWED):
        allowed(["kill,step=1"])
    monkeypatch.setenv(ALLOWED, "1")
    assert allowed(["kill,step=1"]) == (Fault("kill", step=1),)


def test_a_fault_is_for_one_rank_in_one_life_or_in_all() -> None:
    assert [Fault("kill", 1, step=5, life=1).is_in(*place) for place in ((1, 1), (0, 1), (1, 0))] == [
        True,
        False,
        False,
    ]
    assert Fault("kill", 1, step=5, life=None).is_in(1, 7)
