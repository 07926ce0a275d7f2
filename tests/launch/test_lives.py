"""Whether a run that broke is taken up again: decisions alone."""

import pytest

from penstock.errors import RunError
from penstock.launch import Death, Endurance, Lives


def killed(rank: int = 1, step: int = 5, signal: str = "SIGKILL") -> Death:
    return Death.of(RunError("a rank was killed", rank=rank, signal=signal, step=step, action="1F0"))


def raised(step: int = 5, summary: str = "KeyError: 'page 3'") -> Death:
    error = RunError("a rank failed", rank=0, step=step)
    error.rank_summary = summary
    return Death.of(error)


def test_a_death_says_who_died_where_and_how() -> None:
    assert killed() == Death(1, "5", "1F0", "a rank was killed SIGKILL", is_sudden=True, is_wished=False)
    assert raised() == Death(0, "5", "", "KeyError: 'page 3'", is_sudden=False, is_wished=False)


def test_pauses_grow_until_there_is_a_newer_checkpoint() -> None:
    lives = Lives(Endurance(restarts=10, longest_pause_seconds=3.0), 4)
    newest = [10, 10, 10, 10, 20, 20]
    pauses = [lives.after(killed(step=step), one).pause_seconds for step, one in enumerate(newest)]
    assert pauses == [0.5, 1.0, 2.0, 3.0, 0.5, 1.0]


def test_so_many_restarts_and_no_more() -> None:
    lives = Lives(Endurance(restarts=2), 4)
    ends = [lives.after(killed(step=step), step).end for step in range(3)]
    assert ends == ["", "", "it was restarted 2 times, which is as often as --restarts allows"]


@pytest.mark.parametrize("death", [killed(), raised()])
def test_the_same_error_at_the_same_step_twice_is_the_end(death: Death) -> None:
    lives = Lives(Endurance(restarts=9), 4)
    assert not lives.after(death, 4).end
    assert "twice at the same step" in lives.after(death, 4).end


def test_who_breaks_before_its_first_step_breaks_at_the_step_of_the_checkpoint() -> None:
    lives = Lives(Endurance(restarts=9), 4)
    assert not lives.after(raised(4), 4).end
    assert "twice at the same step" in lives.after(raised(4)._replace(step=""), 4).end


@pytest.mark.parametrize("other", [killed(rank=2), killed(step=6), killed(signal="SIGABRT"), raised(5)])
def test_another_error_is_not_the_same(other: Death) -> None:
    lives = Lives(Endurance(restarts=9), 4)
    lives.after(killed(), 4)
    assert not lives.after(other, 4).end


@pytest.mark.parametrize("signal", ["SIGTERM", "SIGINT"])
def test_who_is_asked_to_stop_is_not_started_again(signal: str) -> None:
    assert Lives(Endurance(), 4).after(killed(signal=signal), None).end == "it was asked to stop"


def test_a_rank_that_dies_twice_in_a_row_is_gone_and_the_others_go_on() -> None:
    lives = Lives(Endurance(restarts=9, min_ranks=2), 4)
    deaths = [killed(1, 5), killed(1, 3), killed(1, 5), killed(2, 6), killed(2, 6), killed(2, 6)]
    assert [lives.after(death, 4).ranks for death in deaths] == [4, 3, 3, 3, 2, 2]


def test_with_as_few_ranks_as_allowed_the_same_death_twice_is_the_end() -> None:
    lives = Lives(Endurance(restarts=9, min_ranks=4), 4)
    assert [bool(lives.after(killed(), 4).end) for _ in range(2)] == [False, True]


def test_an_exception_is_no_sign_that_a_rank_is_gone() -> None:
    lives = Lives(Endurance(restarts=9, min_ranks=1), 4)
    assert [lives.after(raised(), 4).ranks for _ in range(2)] == [4, 4]


def test_what_all_ranks_raise_is_the_same_whichever_tells_it() -> None:
    lives = Lives(Endurance(restarts=9), 4)
    lives.after(raised(), 4)
    assert "twice at the same step" in lives.after(raised()._replace(rank=3, action="3F0"), 4).end


def test_what_a_rank_decided_on_is_the_end() -> None:
    error = RunError("3 steps in a row were left out", rank=0, step=5)
    error.is_final = True
    assert Lives(Endurance(), 4).after(Death.of(error), 4).end == "it would come to the same"
