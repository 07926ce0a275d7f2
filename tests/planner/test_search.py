"""search: the plan that the options ask for, and the best where they leave something open."""

from dataclasses import replace
from typing import ClassVar

import pytest

from penstock.errors import PartitionError, PlanError, ScheduleError
from penstock.ir import Backward, Forward, Graph, Node, Partition, Placement, Profile, Schedule, Value
from penstock.partitioners import PARTITIONERS, Division, Partitioner, Problem, divide
from penstock.planner import Measured, PlanOptions, search
from penstock.planner.plan_search import node_moves
from penstock.schedules import SCHEDULES, build
from tests.planner.chains import SPEC, measured

LAYERS = measured([1.0] * 8)
OPTIONS = PlanOptions(2, schedule="1f1b", partitioner="uniform")
HEAVY = measured([1.0] * 32 + [4.0])


def plan(microbatches=4, model=LAYERS, **changed):
    return search({microbatches: model}, replace(OPTIONS, **changed))


def sizes(made):
    return [len(nodes) for nodes in made.partition.stages]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_of_the_table_makes_a_plan(name):
    made = plan(schedule=name)
    assert made.choices.schedule == name
    assert made.schedule.num_microbatches == 4
    assert made.lower_bound <= made.predicted.makespan


def test_without_a_schedule_no_schedule_of_the_table_is_shorter():
    best = plan(schedule="auto", partitioner="auto")
    shortest = min(plan(schedule=name, partitioner="auto").predicted.makespan for name in SCHEDULES)
    assert best.predicted.makespan <= shortest


def test_stages_per_rank_are_as_asked_for():
    assert plan(schedule="interleaved", stages_per_rank=3).num_stages == 6


def test_explicit_lists_give_the_stages_and_their_number():
    lists = [[f"layers.{index}"] for index in range(3)] + [[f"layers.{index}" for index in range(3, 8)]]
    assert sizes(plan(schedule="interleaved", partitioner=lists)) == [1, 1, 1, 5]


def test_stages_of_the_users_own_are_taken_as_they_are():
    own = Partition((tuple(f"layers.{index}" for index in range(7)), ("layers.7",)))
    assert plan(partitioner=own).partition == own
    assert plan(partitioner=own, schedule="auto").partition == own


def test_a_schedule_of_the_users_own_is_taken_as_it_is():
    own = build("gpipe", 2, 4)
    made = plan(schedule=own)
    assert made.schedule == own
    assert made.choices.schedule == "given"


def test_a_schedule_for_other_numbers_is_refused():
    with pytest.raises(PlanError, match="must have the requested sizes"):
        plan(schedule=build("gpipe", 2, 5))


def test_stages_that_do_not_divide_among_the_ranks_are_refused():
    lists = [["layers.0"], ["layers.1"], [f"layers.{index}" for index in range(2, 8)]]
    with pytest.raises(PlanError, match=r"must be a multiple of the ranks \(stages: 3, ranks: 2\)"):
        plan(partitioner=lists)


def test_unknown_words_are_refused_with_those_that_are_known():
    with pytest.raises(PartitionError, match="did you mean uniform"):
        plan(partitioner="unifrom")
    with pytest.raises(ScheduleError, match="1f1b"):
        plan(schedule="1f2b")
    with pytest.raises(PlanError, match="recompute must be"):
        plan(recompute="some")
    with pytest.raises(PlanError, match="budget"):
        plan(budget_seconds=-1)


def test_more_stages_than_places_to_cut_are_refused():
    with pytest.raises(PartitionError, match="fewer places to cut"):
        plan(model=measured([1.0, 1.0]), ranks=4)


@pytest.mark.untraced
def test_cuts_balance_the_sum_of_a_rank():
    made = plan(32, HEAVY, ranks=8, schedule="zbv", partitioner="linear")
    loads = [sum(made.costs.forward[stage] for stage in stages) for stages in Placement.vee(8).stages]
    assert max(loads) == 5.0


@pytest.mark.untraced
def test_a_heavy_head_costs_no_more_than_a_fifth_of_the_ideal():
    made = plan(32, HEAVY, ranks=8, schedule="auto", partitioner="auto", budget_seconds=3.0)
    assert made.predicted.makespan / (3 * 36 * 32 / 8) <= 1.20


def test_the_number_of_microbatches_is_chosen_too():
    half, quarter = measured([2.0] * 8), measured([1.0] * 8)
    made = search({2: half, 4: quarter}, OPTIONS)
    assert made.num_microbatches == 4
    assert {candidate.num_microbatches for candidate in made.search.candidates} == {2, 4}


def test_the_chosen_plan_comes_first_and_the_others_have_reasons():
    first, *others = plan(schedule="auto").search.candidates
    assert first.predicted == plan(schedule="auto").predicted
    assert others
    assert all("slower" in other.lost or "as fast" in other.lost for other in others)


def test_cuts_are_moved_by_a_node_where_that_helps():
    # The first stage keeps nothing waiting before it, so that one more node there is hidden.
    made = plan(2, measured([1.0] * 5), partitioner="auto")
    assert made.predicted.makespan <= plan(2, measured([1.0] * 5), partitioner="linear").predicted.makespan


def test_without_time_something_is_found_all_the_same():
    assert plan(schedule="auto", partitioner="auto", budget_seconds=0).num_ranks == 2


class Recorded(Partitioner):
    """A partitioner that only this test adds to the table."""

    name = "recorded"
    seen: ClassVar[list[Placement]] = []

    def divide(self, problem: Problem) -> Division:
        self.seen.append(problem.placed)
        return divide("uniform", problem)


def test_a_new_partitioner_of_the_table_is_searched(monkeypatch):
    monkeypatch.setitem(PARTITIONERS, "recorded", Recorded)
    # A bound that no order of the table reaches, so that other cuts are tried.
    plan(model=measured([3.0, 1.0, 1.0, 1.0, 2.0, 5.0, 1.0, 1.0]), partitioner="auto")
    assert Recorded.seen == [Placement.loop(2)]


def test_a_move_for_which_the_given_order_would_deadlock_is_left_out():
    names = ("a.0", "a.1", "b.0", "b.1", "join")
    reads = (("x",), ("a.0",), ("x",), ("b.0",), ("a.1", "b.1"))
    nodes = tuple(Node(name, read, (Value(name, SPEC),)) for name, read in zip(names, reads, strict=True))
    graph = Graph(nodes, (Value("x", SPEC),), ("join",))
    branches = Partition((names[:2], names[2:4], names[4:]))
    # The second branch runs first. With "a.1" moved into it, it would wait for the first one.
    order = [Forward(1, 0), Forward(0, 0), Forward(2, 0), Backward(2, 0), Backward(0, 0), Backward(1, 0)]
    given = Schedule.of(Placement((0, 0, 0)), 1, [order])
    made = search({1: Measured(graph, Profile.uniform(graph))}, PlanOptions(1, schedule=given, partitioner=branches))
    assert made.schedule == given
    assert ("a.1", 0, 1) in [(node, source, target) for _, node, source, target in node_moves(graph, branches)]
    assert not any("a.1" in reason for reason in made.search.reasons)
