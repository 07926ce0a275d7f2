"""Dependence: the array form of the rule agrees with the rule itself."""

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.ir import (
    RULES,
    Backward,
    Cuts,
    Dependencies,
    Fact,
    Forward,
    InputGrad,
    Kind,
    Makers,
    Orders,
    Overlap,
    Reduce,
    WeightGrad,
    find_dependencies,
    makes,
    needs,
    neighbours,
)


def random_orders(seed, num_stages, num_microbatches, num_ranks):
    """Passes of every stage and microbatch in any order, some split, some overlapped, some missing."""
    rng = random.Random(seed)
    ranks = [[] for _ in range(num_ranks)]
    for stage in range(num_stages):
        own = ranks[rng.randrange(num_ranks)]
        for microbatch in range(num_microbatches):
            halves = [Backward(stage, microbatch)]
            if rng.random() < 0.5:
                halves = [InputGrad(stage, microbatch), WeightGrad(stage, microbatch)]
            own += [action for action in (Forward(stage, microbatch), *halves) if rng.random() < 0.9]
        own.append(Reduce(stage))
    for own in ranks:
        rng.shuffle(own)
    return Orders.of([overlapped(own, rng) for own in ranks])


def overlapped(order, rng):
    result = []
    for action in order:
        last = result[-1] if result else None
        if isinstance(last, Forward) and isinstance(action, Backward) and rng.random() < 0.5:
            result[-1] = Overlap(last, action)
        else:
            result.append(action)
    return result


def random_cuts(seed, num_stages):
    rng = random.Random(seed)
    edges = [(a, b) for b in range(num_stages) for a in range(b) if rng.random() < 0.5]
    return Cuts.of(num_stages, edges, [edge for edge in edges if rng.random() < 0.3])


def expected_links(orders, cuts):
    """The same links from the scalar rule, one action after another."""
    actions = [action for order in orders for action in order]
    passes = [(index, action) for index, action in enumerate(actions) if not isinstance(action, Reduce)]
    parts = [(index, part) for index, action in passes for part in action.parts]
    maker = {fact: index for index, part in parts for fact in makes(part)}
    return sorted(
        (index, maker.get(need, -1), need.fact, need.stage, part.stage, need.microbatch)
        for index, part in parts
        for need in needs(part, cuts)
    )


def found_links(orders, cuts, num_microbatches):
    passes = orders.passes
    return find_dependencies(passes, Makers(passes, cuts.num_stages, num_microbatches), cuts)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 4), st.integers(1, 3))
def test_all_links_at_once_are_the_links_of_every_action(seed, num_stages, num_microbatches, num_ranks):
    orders, cuts = random_orders(seed, num_stages, num_microbatches, num_ranks), random_cuts(seed + 1, num_stages)
    links = found_links(orders, cuts, num_microbatches)
    assert sorted(zip(*(column.tolist() for column in links), strict=True)) == expected_links(orders, cuts)


def test_a_fact_that_nothing_makes_is_needed_in_vain():
    links = found_links(Orders.of([[Forward(1, 0)]]), Cuts.chain(2), 1)
    assert links.needed.tolist() == [-1]
    assert (links.source.tolist(), links.target.tolist()) == ([0], [1])


def test_links_can_be_chosen():
    links = found_links(Orders.of([[Forward(0, 0), Forward(1, 0), Backward(1, 0)]]), Cuts.chain(2), 1)
    assert links.where(links.fact == Fact.OUTPUT).waiter.tolist() == [1, 2]
    assert isinstance(links.where(links.waiter < 0), Dependencies)


def test_makers_say_who_makes_a_fact_and_how_often():
    passes = Orders.of([[Forward(0, 0), Forward(0, 0), Backward(0, 1), WeightGrad(0, 1)]]).passes
    makers = Makers(passes, 1, 2)
    assert makers[Fact.OUTPUT].tolist() == [[1, -1]]
    assert makers.times(Fact.OUTPUT).tolist() == [[2, 0]]
    assert makers.times(Fact.WEIGHT_GRADIENT).tolist() == [[0, 2]]


def test_neighbours_lists_every_edge_of_every_given_stage():
    rows, others = neighbours(np.array([2, 0, 2]), ((0, 1), (0, 2), (1, 2)), (1, 0), 3)
    assert list(zip(rows.tolist(), others.tolist(), strict=True)) == [(0, 0), (0, 1), (2, 0), (2, 1)]


def test_neighbours_of_cuts_without_edges_are_none():
    rows, others = neighbours(np.array([0, 1]), (), (0, 1), 2)
    assert (len(rows), len(others)) == (0, 0)


def test_every_kind_of_pass_has_a_rule():
    assert set(RULES) == {Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD}
