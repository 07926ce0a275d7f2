"""metis: undirected parts become acyclic stages."""

import sys

import pytest

from benchmarks.graphs import chain
from penstock.errors import PartitionError
from penstock.ir import Cluster
from penstock.partitioners import Problem, divide
from tests.partitioners.examples import branches, outcome, wild


def test_without_the_library_the_error_hints_at_installing_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(PartitionError, match=r"metis is not installed\ntry: pip install 'penstock\[metis\]'"):
        divide("metis", Problem(*chain([1, 1]), Cluster(2)))


def test_branches_are_stages_of_their_own():
    pytest.importorskip("pymetis")
    graph, profile = branches(4, 6)
    metis, linear = (divide(name, Problem(graph, profile, Cluster(4))) for name in ("metis", "linear"))
    metis.partition.check(graph)
    assert metis.bottleneck_seconds == 7
    assert metis.cut_bytes == 3 * 10
    assert linear.cut_bytes > 3 * metis.cut_bytes


@pytest.mark.untraced
@pytest.mark.parametrize("seed", range(8))
def test_metis_is_never_worse_than_linear(seed):
    pytest.importorskip("pymetis")
    problem = Problem(*wild(seed, 40), Cluster(4))
    assert outcome(divide("metis", problem)) <= outcome(divide("linear", problem))
