"""The time that the runtime takes besides the model."""

import pytest

import penstock
from penstock.ir import Cluster, Overhead, StageCosts
from penstock.planner import ScheduleProblem, synthesise


def test_a_step_begins_with_its_overhead():
    schedule = penstock.schedule("1f1b", 2, 4)
    plain = penstock.simulate(schedule)
    trace = penstock.simulate(schedule, cluster=Cluster(2, overhead=Overhead(step_seconds=3.0)))
    assert trace.starts[0] == 3.0
    assert trace.makespan == plain.makespan + 3.0
    assert trace.span == plain.span


def test_overhead_of_messages_counts_on_the_critical_path_at_both_ends():
    # Two forwards and two backwards in a row, with a message between every two ranks.
    cluster = Cluster(2, overhead=Overhead(pass_seconds=0.5, message_seconds=0.25))
    trace = penstock.simulate(penstock.schedule("1f1b", 2, 1), cluster=cluster)
    assert trace.makespan == 6.0 + 4 * 0.5 + 4 * 0.25


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "interleaved"])
def test_the_lower_bound_holds_with_overhead(name):
    schedule = penstock.schedule(name, 3, 6)
    cluster = Cluster(3, latency=0.1, overhead=Overhead(0.2, 0.3, 4.0))
    program = penstock.lower(schedule)
    costs = cluster.costs_on_ranks(StageCosts.uniform(schedule.num_stages), schedule.placement, program.cuts)
    made = synthesise(ScheduleProblem.of(costs, schedule.placement, 6, cluster), budget_seconds=0.05, may_prove=False)
    simulated = penstock.simulate(program, StageCosts.uniform(schedule.num_stages), cluster)
    assert 4.0 < made.bound.seconds <= made.seconds <= simulated.makespan
