"""More ranks than cores: ranks that compute at the same time are slower, and nothing is computed twice."""

import numpy as np
import pytest

import penstock
from penstock.ir import Cluster
from penstock.schedules import SCHEDULES
from penstock.simulate import simulation
from penstock.simulate.shared_cores import Message, run_on_shared_cores

RANKS, MICROBATCHES = 4, 6


def costs(stages: int) -> penstock.StageCosts:
    """Of uneven lengths, whose sums are rounded."""
    uneven = np.random.default_rng(0).uniform(0.1, 1.0, (3, stages))
    return penstock.StageCosts(*(tuple(row.tolist()) for row in uneven), activation_bytes=(1,) * stages)


def trace(name: str, cores: int | None, latency: float = 0.03) -> penstock.Trace:
    program = penstock.lower(penstock.schedule(name, RANKS, MICROBATCHES))
    return penstock.simulate(program, costs(program.num_stages), Cluster(RANKS, latency=latency, cores=cores))


def test_two_ranks_at_a_time_on_one_core_take_twice_as_long() -> None:
    found = run_on_shared_cores(1, [0, 1, 2], [1.0, 3.0], [])
    assert found is not None
    assert found.starts.tolist() == [0.0, 0.0]
    assert found.ends.tolist() == [2.0, 4.0]  # both at half speed until one ends


def test_a_message_leaves_when_its_link_is_free() -> None:
    messages = [
        Message(before_send=0, user=1, link=0, seconds=1.0, latency=0.5),
        Message(before_send=0, user=2, link=0, seconds=1.0, latency=0.5),
    ]
    found = run_on_shared_cores(1, [0, 1, 3], [1.0, 1.0, 1.0], messages)
    assert found is not None
    assert found.arrived.tolist() == [2.5, 3.5]
    assert found.ends.tolist() == [1.0, 3.5, 4.5]


def test_orders_that_block_are_identified() -> None:
    message = Message(before_send=0, user=0, link=0, seconds=0.0, latency=0.0)
    assert run_on_shared_cores(1, [0, 1], [1.0], [message]) is None


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_core_for_every_rank_is_the_same_as_no_limit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class OnSharedCores(simulation._FixedOrder):
        def __init__(self, program: penstock.Program, costs: penstock.StageCosts, cluster: Cluster) -> None:
            super().__init__(program, costs, cluster)
            self._cores = RANKS

    expected = trace(name, None)
    monkeypatch.setattr(simulation, "_FixedOrder", OnSharedCores)
    found = trace(name, None)
    assert found.starts.values == pytest.approx(expected.starts.values, abs=1e-9)
    assert found.ends.values == pytest.approx(expected.ends.values, abs=1e-9)
    assert found.arrived.values == pytest.approx(expected.arrived.values, abs=1e-9)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("cores", [1, 2, 3])
def test_the_cores_do_all_work_and_no_more(name: str, cores: int) -> None:
    alone, found = trace(name, None), trace(name, cores)
    work = sum(alone.work)
    assert max(alone.makespan, work / cores) <= found.makespan + 1e-9
    assert found.makespan <= work + alone.makespan


def test_one_core_computes_all_the_time_if_messages_take_none() -> None:
    assert trace("1f1b", 1, latency=0.0).makespan == pytest.approx(sum(trace("1f1b", None).work))


@pytest.mark.parametrize("cores", [0, -1, 1.5, "two"])
def test_cores_are_a_whole_number(cores: object) -> None:
    with pytest.raises(penstock.CostError, match="cores must be a whole number above 0"):
        Cluster(2, cores=cores)  # type: ignore[arg-type]
