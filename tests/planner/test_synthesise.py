"""Orders that are made: legal, within memory, never worse than the table, and near the bound."""

import pytest

from benchmarks.instances import Instance, instances
from penstock.errors import ScheduleError
from penstock.ir import Cluster, Cuts, MessageCost, Placement, StageCosts, StateBytes
from penstock.passes import lower, verify
from penstock.planner import ScheduleProblem, synthesise
from penstock.planner.synthesis import Synthesis, local_search
from penstock.planner.synthesis.synthesise import low_memory_orders
from penstock.schedules import build
from penstock.simulate import simulate

BRIEF = 0.2


def checked(problem: ScheduleProblem, seconds: float = BRIEF) -> Synthesis:
    """What is found, after it has been proved legal and within memory."""
    found = synthesise(problem, budget_seconds=seconds, may_prove=False)
    program = lower(found.best.schedule, cuts=problem.cuts)
    verify(program)
    trace = simulate(program, problem.costs, problem.cluster)
    assert found.seconds == pytest.approx(trace.span if problem.objective == "span" else trace.makespan)
    for rank, limit in enumerate(problem.cluster.limits):
        assert trace.peak_bytes(rank) <= limit
    assert found.bound.seconds <= found.seconds
    assert all(found.seconds <= order.seconds for order in found.named)
    return found


@pytest.mark.untraced
@pytest.mark.parametrize("instance", instances(24, seed=11), ids=str)
def test_an_order_is_legal_and_no_worse_than_the_table(instance: Instance) -> None:
    found = checked(instance.problem)
    assert found.gap < 0.35


@pytest.mark.parametrize(
    ("placement", "most"), [(Placement.loop(4), 0.03), (Placement.vee(4), 0.03), (Placement.loop(4, 2), 0.05)]
)
def test_balanced_stages_come_near_the_bound(placement: Placement, most: float) -> None:
    stages = placement.num_stages
    equal = StageCosts.uniform(stages)
    costs = StageCosts(equal.forward, equal.input_grad, equal.weight_grad, activation_bytes=(1,) * stages)
    problem = ScheduleProblem.of(costs, placement, 16, Cluster(4, memory=2 * stages))
    assert checked(problem, 2.0).gap <= most


def test_the_same_problem_gets_the_same_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Effort is counted in passes; only the clock, which is a cap for slow machines, could make a difference."""
    monkeypatch.setattr(local_search, "_SLACK", 1000.0)
    problem = instances(4, seed=2)[3].problem
    one, other = (synthesise(problem, budget_seconds=BRIEF, may_prove=False) for _ in range(2))
    assert one.best.schedule == other.best.schedule


def test_messages_over_slow_links_are_reckoned_with() -> None:
    messages = tuple(MessageCost(stage, stage + 1, 10, 10) for stage in range(3))
    uneven = (1.0, 2.0, 1.0, 2.0)
    costs = StageCosts(uneven, uneven[::-1], uneven, activation_bytes=(20,) * 4, messages=messages)
    found = checked(
        ScheduleProblem.of(costs, Placement.loop(4), 12, Cluster(4, memory=200, latency=0.1, bandwidth=20.0))
    )
    assert found.gap < 0.01


def test_a_backward_is_whole_only_where_nobody_waits_for_its_first_part() -> None:
    costs = StageCosts((1.0, 1.0), (2.0, 2.0), (2.0, 2.0), backward=(3.0, 3.0))
    found = checked(ScheduleProblem.of(costs, Placement.loop(2), 1))
    assert [" ".join(map(str, order)) for order in found.best.schedule.orders] == ["0F0 0B0", "1F0 1I0 1W0"]


def test_an_order_is_found_where_only_one_microbatch_at_a_time_fits() -> None:
    """Whoever runs ahead sends a value for which there is no room yet."""
    messages = tuple(MessageCost(stage, stage + 1, 2, 2) for stage in range(2))
    costs = StageCosts((1.0,) * 3, (1.0,) * 3, (1.0,) * 3, activation_bytes=(4,) * 3, messages=messages)
    unlimited = ScheduleProblem.of(costs, Placement.loop(3), 4)
    least = [min(peaks) for peaks in zip(*(order.peaks for order in low_memory_orders(unlimited)), strict=True)]
    checked(ScheduleProblem.of(costs, Placement.loop(3), 4, Cluster(3, memory=tuple(least))))


def test_received_values_must_fit_beside_activations() -> None:
    """A message that waits takes memory of its own."""
    messages = tuple(MessageCost(stage, stage + 1, 30, 30) for stage in range(3))
    costs = StageCosts((1.0,) * 4, (1.0,) * 4, (1.0,) * 4, activation_bytes=(40,) * 4, messages=messages)
    checked(ScheduleProblem.of(costs, Placement.loop(4), 8, Cluster(4, memory=200)))


def test_static_memory_of_a_stage_is_not_free_for_activations() -> None:
    state = (StateBytes(parameters=3),) * 2
    costs = StageCosts((1.0,) * 2, (1.0,) * 2, (1.0,) * 2, activation_bytes=(1, 1), state=state)
    found = checked(ScheduleProblem.of(costs, Placement.loop(2), 6, Cluster(2, memory=4)))
    assert found.best.peaks == (4, 4)


def test_nothing_that_fits_is_an_error_with_figures() -> None:
    costs = StageCosts((1.0,) * 2, (1.0,) * 2, (1.0,) * 2, activation_bytes=(7, 9))
    with pytest.raises(ScheduleError, match=r"no order fits in memory.*rank: 1") as refused:
        synthesise(ScheduleProblem.of(costs, Placement.loop(2), 4, Cluster(2, memory=8)))
    assert "9" in str(refused.value)


def test_where_a_full_backward_is_quicker_its_parts_are_joined() -> None:
    """Parts take twice as long as the whole, so that almost none should stand alone."""
    costs = StageCosts((1.0,) * 4, (2.0,) * 4, (2.0,) * 4, backward=(2.0,) * 4, activation_bytes=(1,) * 4)
    found = checked(ScheduleProblem.of(costs, Placement.loop(4), 8, Cluster(4, memory=4)), 1.0)
    plain = simulate(lower(build("1f1b", 4, 8)), costs, Cluster(4)).makespan
    assert found.seconds <= plain
    kinds = [type(action).__name__ for order in found.best.schedule.orders for action in order]
    assert kinds.count("Backward") > kinds.count("InputGrad")


def test_overlapped_pairs_of_the_table_are_kept_where_they_win() -> None:
    """With all of the shorter half hidden, nothing that runs one pass after another can compete."""
    costs = StageCosts.uniform(8)
    problem = ScheduleProblem.of(costs, Placement.vee(4), 16, Cluster(4, overlap=1.0))
    assert checked(problem).best.name == "dualpipe_v"


def test_any_placement_will_do() -> None:
    """The table has nothing for stages that lie like this."""
    found = checked(ScheduleProblem.of(StageCosts.uniform(5), Placement((0, 1, 2, 1, 0)), 6))
    assert found.named == ()
    assert found.gap < 0.1


def test_one_rank_and_one_microbatch() -> None:
    assert checked(ScheduleProblem.of(StageCosts.uniform(1), Placement.loop(1), 1)).gap == pytest.approx(0.0, abs=1e-6)
    assert checked(ScheduleProblem.of(StageCosts.uniform(3), Placement.loop(3), 1)).seconds > 0


def test_stages_that_take_no_time() -> None:
    found = checked(ScheduleProblem.of(StageCosts((0.0, 1.0), (0.0, 1.0), (0.0, 0.0)), Placement.loop(2), 4))
    assert found.seconds == pytest.approx(8.0)


def test_many_passes_are_left_to_the_table() -> None:
    """A search that could place only a few orders is not begun."""
    found = checked(ScheduleProblem.of(StageCosts.uniform(16), Placement.loop(16), 64), 0.2)
    assert found.best.name in {order.name for order in found.named}


def test_spans_can_be_made_short_in_place_of_the_step() -> None:
    """With twice the memory of 1f1b a rank computes nearly all the time between its first and its last pass."""
    equal = StageCosts.uniform(4, 2.0, 2.0, 1.0)
    costs = StageCosts(
        equal.forward, equal.input_grad, equal.weight_grad, activation_bytes=(3,) * 4, weight_grad_bytes=(1,) * 4
    )
    problem = ScheduleProblem(costs, Placement.loop(4), 12, Cluster(4, memory=24, latency=0.05), Cuts.chain(4), "span")
    found = checked(problem)
    assert found.seconds < 1.03 * 12 * 5
    assert found.seconds < min(order.seconds for order in found.named)
