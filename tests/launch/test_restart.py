"""Whether a run that failed is restarted: decisions only."""

import pytest

from penstock.errors import RunError
from penstock.launch import RankFailure, RestartController, RestartPolicy


def killed(rank: int = 1, step: int = 5, signal: str = "SIGKILL") -> RankFailure:
    return RankFailure.of(RunError("a rank was killed", rank=rank, signal=signal, step=step, action="1F0"))


def raised(step: int = 5, summary: str = "KeyError: 'page 3'") -> RankFailure:
    error = RunError("a rank failed", rank=0, step=step)
    error.rank_summary = summary
    return RankFailure.of(error)


def test_a_failure_names_rank_place_and_cause() -> None:
    assert killed() == RankFailure(1, "5", "1F0", "a rank was killed SIGKILL", is_sudden=True, is_requested=False)
    assert raised() == RankFailure(0, "5", "", "KeyError: 'page 3'", is_sudden=False, is_requested=False)


def test_pauses_grow_until_there_is_a_newer_checkpoint() -> None:
    controller = RestartController(RestartPolicy(restarts=10, longest_pause_seconds=3.0), 4)
    newest = [10, 10, 10, 10, 20, 20]
    pauses = [controller.decide(killed(step=step), one).pause_seconds for step, one in enumerate(newest)]
    assert pauses == [0.5, 1.0, 2.0, 3.0, 0.5, 1.0]


def test_the_number_of_restarts_is_limited() -> None:
    controller = RestartController(RestartPolicy(restarts=2), 4)
    ends = [controller.decide(killed(step=step), step).end for step in range(3)]
    assert ends == ["", "", "already restarted 2 times, the limit of --restarts"]


@pytest.mark.parametrize("failure", [killed(), raised()])
def test_the_same_error_twice_at_the_same_step_ends_the_run(failure: RankFailure) -> None:
    controller = RestartController(RestartPolicy(restarts=9), 4)
    assert not controller.decide(failure, 4).end
    assert "twice at the same step" in controller.decide(failure, 4).end


def test_a_failure_before_the_first_step_counts_at_the_step_of_the_checkpoint() -> None:
    controller = RestartController(RestartPolicy(restarts=9), 4)
    assert not controller.decide(raised(4), 4).end
    assert "twice at the same step" in controller.decide(raised(4)._replace(step=""), 4).end


@pytest.mark.parametrize("other", [killed(rank=2), killed(step=6), killed(signal="SIGABRT"), raised(5)])
def test_another_error_is_not_the_same(other: RankFailure) -> None:
    controller = RestartController(RestartPolicy(restarts=9), 4)
    controller.decide(killed(), 4)
    assert not controller.decide(other, 4).end


@pytest.mark.parametrize("signal", ["SIGTERM", "SIGINT"])
def test_a_run_that_was_stopped_on_purpose_is_not_restarted(signal: str) -> None:
    assert RestartController(RestartPolicy(), 4).decide(killed(signal=signal), None).end == "a stop was requested"


def test_a_rank_that_dies_twice_in_a_row_is_left_out() -> None:
    controller = RestartController(RestartPolicy(restarts=9, min_ranks=2), 4)
    failures = [killed(1, 5), killed(1, 3), killed(1, 5), killed(2, 6), killed(2, 6), killed(2, 6)]
    assert [controller.decide(failure, 4).ranks for failure in failures] == [4, 3, 3, 3, 2, 2]


def test_with_the_minimum_of_ranks_the_same_death_twice_ends_the_run() -> None:
    controller = RestartController(RestartPolicy(restarts=9, min_ranks=4), 4)
    assert [bool(controller.decide(killed(), 4).end) for _ in range(2)] == [False, True]


def test_an_exception_does_not_remove_a_rank() -> None:
    controller = RestartController(RestartPolicy(restarts=9, min_ranks=1), 4)
    assert [controller.decide(raised(), 4).ranks for _ in range(2)] == [4, 4]


def test_an_exception_of_all_ranks_is_the_same_whichever_rank_reports_it() -> None:
    controller = RestartController(RestartPolicy(restarts=9), 4)
    controller.decide(raised(), 4)
    assert "twice at the same step" in controller.decide(raised()._replace(rank=3, action="3F0"), 4).end


def test_a_final_error_ends_the_run() -> None:
    error = RunError("3 steps in a row were skipped", rank=0, step=5)
    error.is_final = True
    assert (
        RestartController(RestartPolicy(), 4).decide(RankFailure.of(error), 4).end
        == "another attempt would fail the same way"
    )
