"""Measured costs make a schedule faster or leave it alone; they never cost time, memory or lawfulness."""

from random import Random

import pytest

from penstock.errors import CostError
from penstock.ir import StageCosts
from penstock.passes import lower, verify
from penstock.schedules import SCHEDULES, build
from penstock.simulate import simulate

SPLIT = [name for name, member in SCHEDULES.items() if member.splits_backward]


def drawn(random, name):
    """Sizes and unequal costs of every stage; some passes take no time, some stages hold nothing."""
    stages_per_rank = random.choice(SCHEDULES[name].allowed_stages_per_rank or (1, 2, 3))
    ranks, microbatches = random.randint(1, 6), random.randint(1, 14)
    num_stages = ranks * stages_per_rank
    times = [[random.choice((0.0, 1.0, random.uniform(0.1, 3.0))) for _ in range(num_stages)] for _ in range(3)]
    kept = [random.randint(0, 9) for _ in range(num_stages)]
    costs = StageCosts(*times, activation_bytes=kept, weight_grad_bytes=[random.randint(0, size) for size in kept])
    return (name, ranks, microbatches, stages_per_rank), costs


def peaks(trace):
    return [trace.peak_bytes(rank) for rank in range(trace.num_ranks)]


@pytest.mark.untraced
@pytest.mark.parametrize("name", SPLIT)
def test_with_costs_a_schedule_is_never_slower_and_never_holds_more(name, is_whole):
    random = Random(name)
    for _ in range(40 if is_whole else 16):
        sizes, costs = drawn(random, name)
        measured = build(*sizes, costs)
        verify(measured)
        before, after = simulate(lower(build(*sizes)), costs), simulate(lower(measured), costs)
        assert after.makespan <= before.makespan * (1 + 1e-12), sizes
        assert all(new <= old for new, old in zip(peaks(after), peaks(before), strict=True)), sizes


@pytest.mark.untraced
@pytest.mark.parametrize("name", ["zb_h1", "zb_h2", "interleaved_zb", "zbv", "v_half", "v_min"])
def test_unequal_costs_do_make_a_schedule_faster(name):
    random, num_gains = Random(1), 0
    for _ in range(30):
        sizes, costs = drawn(random, name)
        before, after = (simulate(lower(build(*sizes, given)), costs).makespan for given in (None, costs))
        num_gains += after < before * (1 - 1e-9)
        if num_gains == 3:
            return
    raise AssertionError(f"{num_gains} of 30")


def test_weight_gradients_move_to_where_a_rank_waits_for_slow_forwards():
    costs = StageCosts(forward=(3, 1), input_grad=(1, 1), weight_grad=(1, 2))
    plain, measured = build("zb_h1", 2, 3), build("zb_h1", 2, 3, costs=costs)
    assert str(plain).splitlines()[1] == "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"
    assert str(measured).splitlines()[1] == "1F0 1I0 1W0 1F1 1I1 1W1 1F2 1I2 1W2"
    assert [simulate(lower(schedule), costs).makespan for schedule in (plain, measured)] == [17.0, 15.0]


def test_costs_with_nothing_to_gain_leave_the_schedule_as_it_is():
    assert build("zbv", 4, 8, costs=StageCosts.uniform(8)) == build("zbv", 4, 8)


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in SPLIT])
def test_schedules_with_full_backwards_have_one_order_whatever_the_costs(name):
    plain = build(name, 3, 6)
    assert build(name, 3, 6, costs=StageCosts.uniform(plain.num_stages, 1.0, 2.0, 3.0)) == plain


@pytest.mark.parametrize("name", SPLIT)
def test_equal_costs_give_equal_schedules(name):
    sizes, costs = drawn(Random(3), name)
    assert build(*sizes, costs) == build(*sizes, costs)


@pytest.mark.parametrize("name", SPLIT)
def test_costs_of_another_number_of_stages_are_refused(name):
    stages = build(name, 4, 8).num_stages
    with pytest.raises(CostError, match=rf"the same number of stages \(costs: {stages + 1}, schedule: {stages}\)"):
        build(name, 4, 8, costs=StageCosts.uniform(stages + 1))
