"""Neighbours: every lawful move of one node over a cut."""

from penstock.ir import Partition
from penstock.planner.neighbours import neighbours
from tests.planner.chains import chain

GRAPH = chain(4)


def moves(*stages):
    partition = Partition(tuple(tuple(f"layers.{index}" for index in stage) for stage in stages))
    return [(move.node, move.source, move.target) for move in neighbours(GRAPH, partition)]


def test_a_cut_moves_both_ways():
    assert moves([0, 1], [2, 3]) == [("layers.1", 0, 1), ("layers.2", 1, 0)]


def test_no_stage_becomes_empty():
    assert moves([0], [1, 2, 3]) == [("layers.1", 1, 0)]


def test_every_cut_is_looked_at():
    assert moves([0], [1, 2], [3]) == [("layers.1", 1, 0), ("layers.2", 1, 2)]
