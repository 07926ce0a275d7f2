"""Replicas average the gradients of a stage while the passes of others still run."""

import pytest

from penstock.errors import CostError
from penstock.ir import Cluster, Replicas, StageCosts, StateBytes
from penstock.passes import lower
from penstock.schedules import build
from penstock.simulate import simulate

RING = Replicas(4, latency=0.5, bandwidth=2.0)


def costs(num_stages: int, gradients: int) -> StageCosts:
    ones = (1.0,) * num_stages
    return StageCosts(ones, ones, ones, state=(StateBytes(0, gradients, 0),) * num_stages)


def makespan(gradients: int, replicas: Replicas = RING, name: str = "1f1b", ranks: int = 2) -> float:
    schedule = build(name, ranks, 4)
    cluster = Cluster(ranks, replicas=replicas)
    return simulate(lower(schedule), costs(schedule.num_stages, gradients), cluster).makespan


def test_a_ring_passes_every_part_around_twice():
    assert RING.reduction_seconds(16) == 6 * (0.5 + 16 / 4 / 2.0)


def test_one_replica_reduces_nothing():
    assert makespan(10**9, Replicas(1, 1.0, 1.0)) == makespan(0, Replicas())


def test_the_first_rank_ends_last_and_its_reduction_is_all_that_is_seen():
    # The last rank of 1f1b is done one backward and more before the first: its reduction hides behind that.
    assert makespan(16) == makespan(16, Replicas()) + RING.reduction_seconds(16)


def test_two_stages_of_a_rank_reduce_one_after_the_other():
    alone = simulate(lower(build("zbv", 1, 1)), costs(2, 16), Cluster(1, replicas=RING))
    # The weight gradients of both stages come in the last second; the second reduction waits for the first.
    reductions = [span for span in alone.spans if str(span.action).endswith("REDUCE_GRAD")]
    assert reductions[1].start == reductions[0].end
    assert alone.makespan == reductions[1].end


@pytest.mark.parametrize("count", [0, -1, 1.5, "many"])
def test_a_number_of_replicas_that_is_none_is_refused(count):
    with pytest.raises(CostError, match="replicas"):
        Replicas(count)


def test_a_bare_number_is_no_replicas():
    with pytest.raises(CostError, match=r"try: replicas=Replicas\(4"):
        Cluster(2, replicas=4)
