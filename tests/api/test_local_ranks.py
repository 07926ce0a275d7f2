"""Plans for ranks that are processes of this machine."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.api import local_ranks
from penstock.ir import Cluster, Overhead, Replicas, StageCosts
from penstock.measure import timing

FOUND = Cluster(2, latency=1e-5, bandwidth=1e9, overhead=Overhead(0.1, 0.2, 0.3))
X = torch.ones(4, 8)


def model() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path) -> list[int]:
    """How often the ranks were measured."""
    times: list[int] = []

    def measure() -> tuple[Cluster, bool]:
        times.append(1)
        return FOUND, True

    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    monkeypatch.setenv(local_ranks.MEASURE_RANKS_VARIABLE, "1")
    monkeypatch.setattr(local_ranks, "_measure_ranks", measure)
    monkeypatch.setattr(local_ranks, "num_cores", lambda: 64)
    return times


def test_ranks_of_this_machine_are_measured_once(measured: list[int]) -> None:
    plans = [penstock.plan(model(), (X,), ranks=ranks, microbatches=2, schedule="1f1b") for ranks in (2, 3)]
    assert len(measured) == 1
    assert [plan.cluster.overhead for plan in plans] == [FOUND.overhead] * 2
    assert plans[0].predicted.makespan > 0.3 + 4 * 0.1 + 4 * 0.2
    assert plans[0].lower_bound <= plans[0].predicted.makespan


def test_an_unreliable_measurement_is_repeated_and_not_kept(
    measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = [False, True, False, False, True]
    monkeypatch.setattr(local_ranks, "_measure_ranks", lambda: (FOUND, results.pop(0)))
    directory = os.environ["PENSTOCK_CACHE"]
    assert local_ranks.local_ranks(2) == local_ranks.local_ranks(2) == FOUND
    assert len(results) == 3  # the second time it was reliable, and then known
    penstock.clear_profiles(directory)
    with pytest.warns(penstock.PenstockWarning, match="other load"):
        assert local_ranks.local_ranks(2) == FOUND
    assert local_ranks.local_ranks(2) == FOUND
    assert not results


def test_passes_that_cost_nothing_in_half_of_the_measurement_are_unreliable(monkeypatch: pytest.MonkeyPatch) -> None:
    def runs(*alone: float) -> list[Any]:
        """What two ranks return: passes of a second with the runtime, which take so many seconds without it."""
        rounds = [local_ranks._Round(trace.makespan + 0.5, trace, (each, each)) for each in alone]
        return [local_ranks._RankCosts(rounds, (), slowdown) for slowdown in (1.25, 1.0)]

    trace = penstock.simulate(local_ranks._plan(), StageCosts((1.0, 1.0), (0.5, 0.5), (0.5, 0.5)))
    for alone, is_reliable in ((0.0, 0.2), True), ((0.0, 1.0), False), ((1.0, 1.0), False):
        results = runs(*alone)
        monkeypatch.setattr(local_ranks, "launch", lambda *_, results=results, **__: results)
        found, got = local_ranks._measure_ranks()
        assert got == is_reliable
        assert found.overhead.pass_seconds == 1.0 - min(alone)
        assert found.overhead.step_seconds == pytest.approx(0.5)
        assert found.overhead.slowdown == 1.25


def test_a_given_cluster_is_not_measured(measured: list[int]) -> None:
    plan = penstock.plan(model(), (X,), ranks=Cluster(2), microbatches=2, schedule="1f1b")
    assert not measured
    assert plan.cluster == Cluster(2)


def test_a_daemon_which_cannot_start_processes_does_not_measure(
    measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_ranks.multiprocessing, "current_process", lambda: SimpleNamespace(daemon=True))
    assert local_ranks.local_ranks(2) == Cluster(2)
    assert not measured


def test_a_preset_of_a_device_is_not_measured(measured: list[int]) -> None:
    plan = penstock.plan(model(), (X,), ranks=2, microbatches=2, schedule="1f1b", device="h100")
    assert not measured
    assert plan.cluster.overhead == Overhead()


def test_ranks_share_cores_as_far_as_the_model_uses_them(measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_ranks, "num_cores", lambda: 2)

    def cores(cluster: Cluster, cpu_share: float) -> int | None:
        return local_ranks.ranks_that_compute(cluster, cpu_share).cores

    assert cores(Cluster(4), 0.98) == 2
    assert cores(Cluster(4, replicas=Replicas(2)), 0.98) == 1
    assert cores(Cluster(2), 0.98) is None
    assert cores(Cluster(4), 0.1) is None


def test_ranks_slow_each_other_down_as_far_as_the_model_uses_their_cores(measured: list[int]) -> None:
    cluster = Cluster(2, overhead=Overhead(slowdown=1.5))
    for share, slowdown in {0.0: 1.0, 0.5: 1.25, 1.0: 1.5, 1.75: 1.5}.items():
        assert local_ranks.ranks_that_compute(cluster, share).overhead.slowdown == slowdown


def test_ranks_that_compute_at_the_same_time_are_measured(measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_ranks, "num_cores", lambda: 2)
    monkeypatch.setattr(local_ranks.dist, "barrier", lambda: None)
    monkeypatch.setattr(local_ranks.dist, "get_rank", lambda: 0)
    # A step takes 1 alone and 1.5 with the other rank, or longer, by other load. Another program has the core before.
    taken, wait = [7.0, *[1.0, 1.5, 2.0, 3.0] * local_ranks._BUSY_ROUNDS], 0.5
    clock = iter([float(t) for index, each in enumerate(taken) for t in (10 * index, 10 * index + each + wait)])
    waited = iter([index * wait for index in range(2 * len(taken))])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(timing, "waited_seconds", lambda: next(waited))
    assert local_ranks._slowdown() == 1.5
    monkeypatch.setattr(local_ranks, "num_cores", lambda: 1)
    assert local_ranks._slowdown() == 1.0


def test_an_overhead_longer_than_the_passes_leads_to_fewer_stages(measured: list[int]) -> None:
    plan = penstock.plan(model(), (X,), ranks=2, microbatches="auto", budget_seconds=1.0)
    assert plan.num_stages == 2
    assert plan.num_microbatches == min(candidate.num_microbatches for candidate in plan.search.candidates)
