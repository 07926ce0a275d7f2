"""Links: every pair of ranks is measured, and all ranks know the same."""

from itertools import chain, combinations, permutations

import pytest

import penstock
from penstock.errors import RunError
from penstock.ir import Cluster
from penstock.measure import measure_copies, measure_links
from penstock.measure.links import ProbeMessages, round_robin

FEW = ProbeMessages(small_bytes=8, large_bytes=1 << 16, small_times=3, large_times=2)


def links() -> Cluster:
    return measure_links(messages=FEW)


def cluster_with_memory() -> Cluster:
    return penstock.measure_links(memory="1GiB")


@pytest.mark.parametrize("ranks", range(1, 10))
def test_a_round_robin_has_every_pair_once_and_no_rank_twice_in_a_round(ranks: int):
    rounds = list(round_robin(ranks))
    assert sorted(chain(*rounds)) == list(combinations(range(ranks), 2))
    for pairs in rounds:
        players = list(chain(*pairs))
        assert len(players) == len(set(players))


@pytest.mark.gloo
def test_every_rank_knows_the_same_links_between_all(pools):
    first, *others = pools[4].run(links)
    assert others == [first] * 3
    assert {(link.source, link.target) for link in first.links} == set(permutations(range(4), 2))


@pytest.mark.gloo
def test_links_have_a_latency_and_a_bandwidth_that_are_possible(pools):
    cluster = pools[4].run(links)[0]
    assert all(1e-7 < link.latency < 10 and 1e3 < link.bandwidth < 1e13 for link in cluster.links)
    assert min(link.latency for link in cluster.links) <= cluster.latency <= max(each.latency for each in cluster.links)


@pytest.mark.gloo
def test_measured_links_include_the_memory_of_ranks(pools):
    assert pools[4].run(cluster_with_memory)[0].limits == (2**30,) * 4


def test_without_a_group_there_are_no_links():
    with pytest.raises(RunError, match="needs an initialized process group"):
        measure_links()


def test_the_copies_of_a_message_take_time_at_both_ends_by_its_size():
    small, large = measure_copies((1 << 12, 1 << 23))
    assert (small.bytes, large.bytes) == (1 << 12, 1 << 23)
    assert large.send_seconds > small.send_seconds > 0
    assert large.receive_seconds > small.receive_seconds > 0
