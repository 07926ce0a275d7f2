"""Cluster, links, replicas and the speed of devices."""

import math
from dataclasses import replace

import numpy as np
import pytest

from penstock.errors import CostError
from penstock.ir import (
    MAX_RANKS,
    Cluster,
    Cuts,
    DeviceSpeed,
    Link,
    MessageCost,
    MessageCpu,
    Overhead,
    Placement,
    StageCosts,
    from_json,
    parse_bytes,
    to_json,
)


def test_one_figure_of_memory_holds_for_every_rank():
    assert Cluster(2, memory="24GiB").memory == (24 * 2**30, 24 * 2**30)
    assert Cluster(2, memory=1024).memory == (1024, 1024)


def test_memory_may_differ_per_rank():
    assert Cluster(2, memory=[1024, "1KB"]).memory == (1024, 1000)


def test_without_memory_there_is_no_limit():
    assert Cluster(2).memory is None


def test_a_link_that_is_not_named_has_the_common_figures():
    cluster = Cluster(3, latency=1e-3, bandwidth=1e9, links=(Link(0, 1, 5e-3, 1e6),))
    assert cluster.link(0, 1) == Link(0, 1, 5e-3, 1e6)
    assert cluster.link(1, 0) == Link(1, 0, 1e-3, 1e9)


def test_rates_of_links_convert_bytes_to_seconds():
    cluster = Cluster(3, latency=0.5, bandwidth=4.0, links=(Link(0, 1, 0.25, 2.0), Link(2, 0)))
    rates = cluster.link_rates(np.array([[0, 1], [2, 0]]), np.array([[1, 0], [0, 1]]))
    assert rates.occupied(np.array(8.0)).tolist() == [[4.0, 2.0], [0.0, 4.0]]
    assert rates.total(np.array(8.0)).tolist() == [[4.25, 2.5], [0.0, 4.25]]
    assert rates.total(np.array(0.0)).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert rates[1].latency.tolist() == [0.0, 0.25]


def test_links_without_names_all_have_the_rates_of_the_cluster():
    rates = Cluster(3, latency=0.5, bandwidth=4.0).link_rates(np.array([0, 2]), np.array([1, 0]))
    assert rates.total(np.array([8.0, 4.0])).tolist() == [2.5, 1.5]


def test_bandwidth_is_scaled_on_every_link_and_infinite_bandwidth_stays():
    cluster = Cluster(3, bandwidth=8.0, links=(Link(0, 1, 0.1, 2.0), Link(1, 0)))
    assert cluster.with_bandwidth_times(0.5) == Cluster(3, bandwidth=4.0, links=(Link(0, 1, 0.1, 1.0), Link(1, 0)))
    assert Cluster(3).with_bandwidth_times(0.5) == Cluster(3)
    assert cluster.with_instant_messages() == Cluster(3)


def test_clusters_are_keys():
    assert len({Cluster(2, memory=[5, 5]), Cluster(2, memory=5)}) == 1


@pytest.mark.parametrize(
    ("text", "size"),
    [(7, 7), ("7", 7), ("7B", 7), ("1.5 MB", 1_500_000), (" 2kib ", 2048), ("1TiB", 2**40), ("2 TB", 2 * 10**12)],
)
def test_sizes_are_read_in_common_units(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "1 XB", "-1", "0", "0.5", "1GiB!", 0, -5, True, 1.5, None, b"1GB"])
def test_an_invalid_size_is_refused(text):
    with pytest.raises(CostError, match="not a size in bytes"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"ranks": 0}, "ranks must be from 1 to the limit"),
        ({"ranks": MAX_RANKS + 1}, "ranks must be from 1 to the limit"),
        ({"ranks": 2.5}, r"ranks must be a whole number \(ranks: 2.5\)"),
        ({"ranks": "4"}, r"ranks must be a whole number \(ranks: '4'\)"),
        ({"ranks": True}, "ranks must be a whole number"),
        ({"latency": -1.0}, "latency must be finite"),
        ({"latency": math.nan}, "latency must be finite"),
        ({"bandwidth": 0.0}, "bandwidth must be finite"),
        ({"bandwidth": math.inf}, "bandwidth must be finite"),
        ({"bandwidth": "10GB"}, r"(?s)bandwidth must be finite.*\(bandwidth: '10GB'\).*try: .*bytes per second"),
        ({"latency": "1ms"}, "latency must be finite"),
        ({"overlap": 1.1}, "overlap must be a share"),
        ({"overlap": "half"}, "overlap must be a share"),
        ({"memory": 1e9}, r"not a size in bytes \(size: 1000000000.0\)"),
        ({"memory": (1, 2, 3)}, "one size, or one per rank"),
        ({"memory": (1, -2)}, "not a size in bytes"),
        ({"links": (Link(0, 2),)}, "must connect ranks of the cluster"),
        ({"links": (Link(0, 1), Link(0, 1, 1.0))}, r"must be named once \(source: 0, target: 1, times: 2\)"),
        ({"links": ((0, 1),)}, "links must be Link records"),
    ],
)
def test_figures_that_make_no_sense_are_refused(wrong, problem):
    with pytest.raises(CostError, match=problem):
        Cluster(**{"ranks": 2, **wrong})


def test_a_link_checks_itself():
    with pytest.raises(CostError, match="latency"):
        Link(0, 1, latency=math.inf)
    with pytest.raises(CostError, match=r"source and target must be ranks \(source: '0', target: 1\)"):
        Link("0", 1)


@pytest.mark.parametrize(
    "size", ["9" * 400, "9" * 5000, "9" * 2_000_000, 10**400, "9000000TiB", 2**63], ids=lambda size: str(size)[:10]
)
def test_a_size_has_a_limit(size):
    with pytest.raises(CostError, match=r"size out of range \(size: .*, limit: 9223372036854775807\)"):
        Cluster(2, memory=size)


def test_a_size_is_exact():
    assert parse_bytes("9007199254740993") == 2**53 + 1
    assert parse_bytes(np.int64(7)) == 7


def test_links_may_come_as_a_list():
    assert Cluster(2, links=[Link(0, 1)]) == Cluster(2, links=(Link(0, 1),))


def test_every_stage_is_as_slow_as_the_rank_that_holds_it():
    assert Cluster(2, slowness=[1, 1.8]).slowness_of(Placement.vee(2)) == (1.0, 1.8, 1.8, 1.0)
    assert Cluster(2).slowness_of(Placement.loop(2)) == (1.0, 1.0)


def test_slowness_is_saved_with_the_cluster():
    cluster = Cluster(3, slowness=(1, 2, 1))
    assert from_json(to_json(cluster)) == cluster != Cluster(3)


def test_a_placement_on_other_ranks_is_refused():
    with pytest.raises(CostError, match=r"the same number of ranks \(cluster: 2, placement: 3\)"):
        Cluster(2, slowness=(1, 2)).slowness_of(Placement.loop(3))


@pytest.mark.parametrize(
    ("slowness", "problem"),
    [
        ((1.0,), r"one factor per rank \(factors: 1, ranks: 2\)"),
        (2.0, r"one factor per rank \(slowness: 2.0, ranks: 2\)"),
        ("12", "one factor per rank"),
        ((1.0, 0.0), "finite and above 0"),
        ((1.0, math.inf), "finite and above 0"),
        ((1.0, "2"), r"(?s)finite and above 0.*try: slowness=\(1, 1.8\)"),
    ],
)
def test_slowness_that_makes_no_sense_is_refused(slowness, problem):
    with pytest.raises(CostError, match=problem):
        Cluster(2, slowness=slowness)


SPEED = DeviceSpeed(flops_per_second=100.0, bytes_per_second=10.0, operation_seconds=0.5)


@pytest.mark.parametrize(("flops", "num_bytes", "seconds"), [(200, 0, 2.5), (0, 30, 3.5), (200, 30, 3.5), (0, 0, 0.5)])
def test_an_operation_takes_as_long_as_the_slower_of_its_arithmetic_and_its_bytes(flops, num_bytes, seconds):
    assert SPEED.seconds(flops, num_bytes) == seconds


@pytest.mark.parametrize("figure", [0.0, -1.0, math.inf, math.nan, "fast"])
def test_a_speed_is_a_number_above_0(figure):
    with pytest.raises(CostError, match="flops_per_second must be a finite number above 0"):
        DeviceSpeed(figure, 1.0)
    with pytest.raises(CostError, match="bytes_per_second must be a finite number above 0"):
        DeviceSpeed(1.0, figure)


def test_no_operation_takes_less_than_no_time():
    with pytest.raises(CostError, match="operation_seconds must be finite seconds"):
        DeviceSpeed(1.0, 1.0, -1e-6)


def test_it_is_printed_in_round_figures():
    assert str(DeviceSpeed(3.12e14, 2.039e12)) == "3.12e+14 flop/s, 2.04e+12 B/s"


def test_costs_on_ranks_include_the_overhead_of_passes_and_of_messages_between_ranks():
    cluster = Cluster(2, overhead=Overhead(pass_seconds=0.5, message_seconds=0.25, step_seconds=9.0))
    placement, cuts = Placement((0, 1, 1)), Cuts.of(3, [(0, 1), (1, 2)], without_gradient=[(0, 1)])
    costs = cluster.costs_on_ranks(StageCosts.uniform(3), placement, cuts)
    assert costs.forward == (1.75, 1.75, 1.5)
    assert costs.input_grad == (1.5, 1.5, 1.5)
    assert costs.weight_grad == (1.0, 1.0, 1.0)
    assert costs.backward == (2.5, 2.5, 2.5)
    assert cluster.costs_without_overhead(costs, placement, cuts) == StageCosts.uniform(3)


def test_passes_of_ranks_that_slow_each_other_down_take_longer_but_not_their_messages():
    cluster = Cluster(2, overhead=Overhead(pass_seconds=0.5, slowdown=1.25), slowness=(1.0, 2.0))
    placement, cuts = Placement((0, 1)), Cuts.chain(2)
    costs = cluster.costs_on_ranks(StageCosts.uniform(2), placement, cuts)
    assert costs.forward == (1.75, 3.0)
    assert costs.weight_grad == (1.25, 2.5)
    assert cluster.costs_without_overhead(costs, placement, cuts) == StageCosts.uniform(2).times((1.0, 2.0))


def test_messages_take_cpu_by_their_size_at_both_ends():
    sizes = (MessageCpu(100, 1.0, 2.0), MessageCpu(200, 3.0, 6.0))
    cluster = Cluster(2, overhead=Overhead(message_seconds=0.5, messages=sizes))
    plain = replace(StageCosts.uniform(2), messages=(MessageCost(0, 1, 50, 300),))
    costs = cluster.costs_on_ranks(plain, Placement((0, 1)), Cuts.chain(2))
    assert costs.forward == (1 + 0.5 + 0.5, 1 + 0.5 + 1.0)
    assert costs.input_grad == (1 + 0.5 + 10.0, 1 + 0.5 + 5.0)
    assert cluster.costs_without_overhead(costs, Placement((0, 1)), Cuts.chain(2)) == plain


def test_partitioners_see_the_cpu_of_messages_as_links():
    cluster = Cluster(2, overhead=Overhead(messages=(MessageCpu(100, 1.0, 2.0),)))
    assert cluster.with_cpu_on_links().bandwidth == 50
    assert Cluster(2).with_cpu_on_links() == Cluster(2)


def test_sizes_of_messages_must_ascend():
    with pytest.raises(CostError, match="messages must have ascending sizes"):
        Overhead(messages=(MessageCpu(2, 0.0, 0.0), MessageCpu(1, 0.0, 0.0)))


def test_messages_of_an_overhead_are_records():
    with pytest.raises(CostError, match=r"messages must be MessageCpu records \(got: 1000\)"):
        Overhead(messages=(1000,))


def test_overhead_below_zero_is_refused():
    with pytest.raises(CostError, match="message_seconds must be finite seconds, 0 or more"):
        Overhead(message_seconds=-1e-6)
    with pytest.raises(CostError, match=r"slowdown must be a finite factor, 1 or more \(got: 0.5\)"):
        Overhead(slowdown=0.5)
    with pytest.raises(CostError, match="overhead must be an Overhead record"):
        Cluster(2, overhead=1e-4)
