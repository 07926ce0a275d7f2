"""Dependencies: the array form of the rule agrees with the rule itself."""

import random

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


def expected(orders, cuts):
    """The same dependencies from the scalar rule, one action after another."""
    actions = [action for order in orders for action in order]
    passes = [(index, action) for index, action in enumerate(actions) if not isinstance(action, Reduce)]
    parts = [(index, part) for index, action in passes for part in action.parts]
    maker = {fact: index for index, part in parts for fact in makes(part)}
    return sorted(
        (index, maker.get(need, -1), need.fact, need.stage, part.stage, need.microbatch)
        for index, part in parts
        for need in needs(part, cuts)
    )


def found(orders, cuts, num_microbatches):
    passes = orders.passes
    return find_dependencies(passes, Makers(passes, cuts.num_stages, num_microbatches), cuts)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 4), st.integers(1, 3))
def test_dependencies_of_whole_orders_are_those_of_every_action(seed, num_stages, num_microbatches, num_ranks):
    orders, cuts = random_orders(seed, num_stages, num_microbatches, num_ranks), random_cuts(seed + 1, num_stages)
    dependencies = found(orders, cuts, num_microbatches)
    assert sorted(zip(*(column.tolist() for column in dependencies), strict=True)) == expected(orders, cuts)


def test_a_fact_that_no_action_makes_has_index_minus_one():
    dependencies = found(Orders.of([[Forward(1, 0)]]), Cuts.chain(2), 1)
    assert dependencies.needed.tolist() == [-1]
    assert (dependencies.source.tolist(), dependencies.target.tolist()) == ([0], [1])


def test_rows_of_dependencies_can_be_selected():
    dependencies = found(Orders.of([[Forward(0, 0), Forward(1, 0), Backward(1, 0)]]), Cuts.chain(2), 1)
    assert dependencies.where(dependencies.fact == Fact.OUTPUT).waiter.tolist() == [1, 2]
    assert isinstance(dependencies.where(dependencies.waiter < 0), Dependencies)


def test_makers_hold_index_and_number_of_makers_of_each_fact():
    passes = Orders.of([[Forward(0, 0), Forward(0, 0), Backward(0, 1), WeightGrad(0, 1)]]).passes
    makers = Makers(passes, 1, 2)
    assert makers[Fact.OUTPUT].tolist() == [[1, -1]]
    assert makers.times(Fact.OUTPUT).tolist() == [[2, 0]]
    assert makers.times(Fact.WEIGHT_GRADIENT).tolist() == [[0, 2]]


def test_every_kind_of_pass_has_a_rule():
    assert set(RULES) == {Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD}
