"""Graphs that others measured: partitions of them are acyclic, and as good as is proven to be possible."""

import pytest

from benchmarks.graphs import BYTES_PER_UNIT, DATA, PIPEDREAM, devices, pipedream
from penstock.ir import Cluster
from penstock.partitioners import Problem, divide
from tests.partitioners.examples import outcome

pytestmark = pytest.mark.skipif(not DATA.exists(), reason="the measured graphs are not here")


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("name", PIPEDREAM)
def test_graphs_of_pipedream_are_cut_within_3_percent_of_even_or_provably_as_well_as_can_be(name, ranks):
    graph, profile = pipedream(name)
    division = divide("acyclic", Problem(graph, profile, Cluster(ranks)))
    division.partition.check(graph)
    even = profile.seconds / ranks
    assert division.bottleneck_seconds <= 1.03 * even or division.proof == "no partition is better"


@pytest.mark.parametrize("name", PIPEDREAM)
def test_at_an_equal_bottleneck_no_more_bytes_cross_than_with_linear(name):
    for ranks in (4, 8):
        problem = Problem(*pipedream(name), Cluster(ranks))
        linear = outcome(divide("linear", problem))
        assert all(outcome(divide(other, problem)) <= linear for other in ("pipedream", "acyclic"))


@pytest.mark.parametrize(("name", "least"), [("bert24_inference", 17.7899), ("bert24_training", 41.7458)])
def test_the_known_optimum_of_six_devices_is_found_and_proven(name, least):
    graph, profile, memory = devices(name)
    cluster = Cluster(6, memory=memory, bandwidth=BYTES_PER_UNIT)
    division = divide("acyclic", Problem(graph, profile, cluster, overlaps=False))
    assert division.bottleneck_seconds == pytest.approx(least, abs=5e-5)
    assert division.proof == "no partition is better"


def test_the_known_optimum_of_six_devices_and_a_slow_processor_is_found():
    graph, profile, memory = devices("resnet50_inference")
    slowness = (1.0, 1.0, 1.0, 1.0, 10.0, 1.0, 1.0)
    cluster = Cluster(7, memory=memory, bandwidth=BYTES_PER_UNIT, slowness=slowness)
    division = divide("acyclic", Problem(graph, profile, cluster, overlaps=False))
    assert division.bottleneck_seconds == pytest.approx(33.7747, abs=5e-5)
    assert division.proof == "no partition is better"
