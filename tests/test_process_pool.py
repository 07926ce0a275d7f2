"""The long-lived processes of the tests: results by rank, and a fresh pool after a failure or a hang."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.process_pool import Deadline, Pools

pytestmark = pytest.mark.gloo


def added(number: int) -> tuple[int, float]:
    total = torch.tensor([float(dist.get_rank() + number)])
    dist.all_reduce(total)
    return os.getpid(), float(total)


def failing() -> None:
    if dist.get_rank() == 1:
        raise ValueError("not today")
    dist.barrier()


def hanging() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def test_tests_that_share_processes_are_one_group_of_a_distributed_run(request: pytest.FixtureRequest) -> None:
    if not os.environ.get("PYTEST_XDIST_WORKER"):
        pytest.skip("one process runs all tests")
    assert request.node.nodeid.endswith("@gloo")


def test_jobs_run_on_the_same_processes_again(pools: Pools) -> None:
    first, second = pools[2].run(added, 1), pools[2].run(added, 2)
    assert [total for _, total in first] == [3.0, 3.0]
    assert [total for _, total in second] == [5.0, 5.0]
    assert [pid for pid, _ in first] == [pid for pid, _ in second]


def test_a_failing_job_fails_its_test_with_the_traceback_of_the_rank(pools: Pools) -> None:
    before = pools[2].run(added, 1)
    with pytest.raises(pytest.fail.Exception, match=r"rank 1:(\n.*)*ValueError: not today"):
        pools[2].run(failing)
    assert {pid for pid, _ in pools[2].run(added, 1)}.isdisjoint(pid for pid, _ in before)


def test_a_hanging_job_fails_its_test_and_names_the_rank(pools: Pools) -> None:
    with pytest.raises(
        pytest.fail.Exception, match=r"rank 1:\nnot done in time\nrank 0: .*\nrank 1: (.*\n)*.*in hanging"
    ):
        pools[2].run(hanging, deadline=0.5)
    assert [total for _, total in pools[2].run(added, 1)] == [3.0, 3.0]


def test_a_deadline_does_not_count_time_in_which_the_machine_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    deadline = Deadline(5.0)
    clock[0] = 100.0
    assert not deadline.is_over
    for clock[0] in range(101, 106):
        is_over = deadline.is_over
    assert is_over
