"""Placement of stages on ranks, and the cuts between stages."""

import pytest

from penstock.errors import PartitionError, ScheduleError
from penstock.ir import MAX_STAGES, Cuts, Placement


def test_a_loop_goes_round():
    assert Placement.loop(3, 2).ranks == (0, 1, 2, 0, 1, 2)


def test_a_vee_goes_down_and_back_up():
    assert Placement.vee(4).ranks == (0, 1, 2, 3, 3, 2, 1, 0)


def test_a_placement_answers_both_ways():
    placement = Placement.vee(2)
    assert [placement[stage] for stage in range(4)] == [0, 1, 1, 0]
    assert placement.stages == ((0, 3), (1, 2))


def test_sizes():
    placement = Placement((0, 1, 0))
    assert (placement.num_stages, len(placement), placement.num_ranks) == (3, 3, 2)


@pytest.mark.parametrize("ranks", [(), (-1,), (0, -1)])
def test_every_stage_needs_a_rank(ranks):
    with pytest.raises(ScheduleError, match="must name a rank"):
        Placement(ranks)


@pytest.mark.parametrize("ranks", [(1,), (0, 2), (0, 0, 2), (0, 10**15)])
def test_every_rank_needs_a_stage(ranks):
    with pytest.raises(ScheduleError, match="every rank must hold a stage"):
        Placement(ranks)


def test_in_a_chain_every_stage_reads_the_one_before():
    cuts = Cuts.chain(3)
    assert cuts.edges == ((0, 1), (1, 2))
    assert cuts.producers == ((), (0,), (1,))
    assert cuts.gradient_consumers == ((1,), (2,), ())


def test_one_stage_has_no_edges():
    assert Cuts.chain(1) == Cuts(1, ())


def test_edges_may_be_given_in_any_order_and_twice():
    assert Cuts.of(3, [(1, 2), (0, 2), (1, 2)]) == Cuts(3, ((0, 2), (1, 2)))


def test_a_skip_has_several_producers_and_consumers():
    cuts = Cuts.of(3, [(0, 1), (0, 2), (1, 2)])
    assert cuts.producers[2] == (0, 1)
    assert cuts.gradient_consumers[0] == (1, 2)


def test_an_edge_without_gradient_is_read_but_returns_nothing():
    cuts = Cuts.of(3, [(0, 1), (0, 2)], without_gradient=[(0, 2)])
    assert cuts.producers[2] == (0,)
    assert cuts.gradient_edges == ((0, 1),)
    assert cuts.gradient_consumers[0] == (1,)


@pytest.mark.parametrize("edge", [(1, 0), (1, 1), (0, 3), (-1, 1)])
def test_an_edge_leads_to_a_later_stage(edge):
    with pytest.raises(PartitionError, match="to a later stage"):
        Cuts.of(3, [edge])


@pytest.mark.parametrize("edges", [((1, 2), (0, 1)), ((0, 1), (0, 1))])
def test_equal_cuts_have_one_form(edges):
    with pytest.raises(PartitionError, match="sorted and distinct"):
        Cuts(3, edges)
    with pytest.raises(PartitionError, match="sorted and distinct"):
        Cuts(3, ((0, 1), (1, 2)), edges)


def test_only_an_edge_can_be_without_gradient():
    with pytest.raises(PartitionError, match=r"must be edges of the cuts \(edges: \[\(0, 2\)\]\)"):
        Cuts.of(3, [(0, 1)], without_gradient=[(0, 2)])


def test_cuts_need_a_stage():
    with pytest.raises(PartitionError, match="at least one stage"):
        Cuts(0, ())


@pytest.mark.parametrize("stages", [MAX_STAGES + 1, 2.5, "3", True])
def test_the_number_of_stages_is_whole_and_limited(stages):
    with pytest.raises(PartitionError, match=r"\(stages: .*, limit: 8192\)"):
        Cuts(stages, ())
