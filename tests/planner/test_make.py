"""make: the plan that a request asks for, and the best of the table where it asks for none."""

from dataclasses import replace

import pytest

from penstock.errors import PartitionError, PlanError, ScheduleError
from penstock.ir.cluster import Cluster
from penstock.ir.graph import Graph, Node, Origin, TensorSpec, Value
from penstock.ir.partition import Partition
from penstock.planner import Request, estimate, make
from penstock.schedules import SCHEDULES, build

SPEC = TensorSpec((4, 8), requires_grad=True)
WEIGHT = TensorSpec((8, 8), requires_grad=True)
LAYERS = 8


def chain(layers: int = LAYERS) -> Graph:
    names = [f"layers.{index}" for index in range(layers)]
    reads = ["x", *names]
    return Graph(
        nodes=tuple(
            Node(name, (read,), (Value(name, SPEC),), (f"{name}.weight",), origin=Origin(name, "Linear", True))
            for name, read in zip(names, reads, strict=False)
        ),
        inputs=(Value("x", TensorSpec((4, 8))),),
        outputs=(names[-1],),
        parameters=tuple(Value(f"{name}.weight", WEIGHT) for name in names),
    )


GRAPH = chain()
REQUEST = Request(Cluster(2), 4, "1f1b", "uniform")


def plan(**changed):
    return make(GRAPH, estimate(GRAPH), replace(REQUEST, **changed))


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_of_the_table_makes_a_plan(name):
    made = plan(schedule=name)
    assert made.choices.schedule == name
    assert made.schedule.num_microbatches == 4
    assert made.lower_bound <= made.predicted.makespan


def test_without_a_schedule_the_shortest_step_wins():
    best = plan(schedule="auto")
    assert best.predicted.makespan == min(plan(schedule=name).predicted.makespan for name in SCHEDULES)


def test_stages_per_rank_are_as_asked_for():
    assert plan(schedule="interleaved", stages_per_rank=3).num_stages == 6


def test_explicit_lists_give_the_stages_and_their_number():
    lists = [[f"layers.{index}"] for index in range(3)] + [[f"layers.{index}" for index in range(3, 8)]]
    made = plan(schedule="interleaved", partitioner=lists)
    assert [len(nodes) for nodes in made.partition.stages] == [1, 1, 1, 5]


def test_a_partition_of_the_users_own_is_taken_as_it_is():
    own = Partition((tuple(f"layers.{index}" for index in range(7)), ("layers.7",)))
    assert plan(partitioner=own).partition == own


def test_a_schedule_of_the_users_own_is_taken_as_it_is():
    own = build("gpipe", 2, 4)
    assert plan(schedule=own).schedule == own


def test_a_schedule_for_other_numbers_is_refused():
    with pytest.raises(PlanError, match="for other numbers"):
        plan(schedule=build("gpipe", 2, 5))


def test_stages_that_do_not_divide_among_the_ranks_are_refused():
    lists = [["layers.0"], ["layers.1"], [f"layers.{index}" for index in range(2, 8)]]
    with pytest.raises(PlanError, match=r"do not divide among the ranks \(stages: 3, ranks: 2\)"):
        plan(partitioner=lists)


def test_unknown_words_are_refused_with_those_that_are_known():
    with pytest.raises(PlanError, match="unknown partitioner"):
        plan(partitioner="unifrom")
    with pytest.raises(ScheduleError, match="1f1b"):
        plan(schedule="1f2b")
    with pytest.raises(PlanError, match="unknown recompute"):
        plan(recompute="some")


def test_recomputation_keeps_less_and_takes_longer():
    whole, again = plan(), plan(recompute="full")
    assert again.choices.recompute == (True, True)
    assert again.predicted.makespan > whole.predicted.makespan
    assert all(less <= more for less, more in zip(again.predicted.peaks, whole.predicted.peaks, strict=True))


def test_recomputation_is_chosen_only_where_memory_demands_it():
    whole, again = plan(), plan(recompute="full")
    tight = tuple((a + b) // 2 for a, b in zip(whole.predicted.peaks, again.predicted.peaks, strict=True))
    assert plan(recompute="auto").choices.recompute == (False, False)
    assert plan(recompute="auto", memory=tight).choices.recompute == (True, True)


def test_a_plan_that_does_not_fit_is_refused_with_the_figures():
    with pytest.raises(PlanError, match="does not fit in memory \\(rank: 0, peak bytes: "):
        plan(memory=(100, 100))


def test_auto_leaves_out_what_does_not_fit():
    roomy = plan(schedule="auto")
    tight = tuple(peak - 1 for peak in roomy.predicted.peaks)
    with pytest.raises(PlanError, match="no schedule of the table fits"):
        plan(schedule="auto", memory=tuple(1 for _ in tight))


def test_more_stages_than_places_to_cut_are_refused():
    with pytest.raises(PartitionError, match="fewer places to cut"):
        make(chain(2), estimate(chain(2)), replace(REQUEST, cluster=Cluster(4)))
