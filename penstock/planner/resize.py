"""resize: the same plan for another number of microbatches of the same size, or for one stage on one rank."""

from dataclasses import replace

from penstock.ir import Choices, Cluster, Partition, Plan, Prediction, StageCosts
from penstock.passes import lower
from penstock.planner.synthesis import Problem, lower_bound
from penstock.schedules import SCHEDULES, build
from penstock.simulate import simulate


def with_microbatches(plan: Plan, count: int) -> Plan:
    """The same cuts and the same kind of order; every rank comes to the same.

    A schedule of the table is made anew. Of any other, which was given or searched for, the beginning is taken, or it
    is repeated.
    """
    if plan.choices.schedule in SCHEDULES:
        built = build(plan.choices.schedule, plan.num_ranks, count, plan.num_stages // plan.num_ranks, plan.costs)
    else:
        built = plan.schedule.repeated(count)
    trace = simulate(lower(built, cuts=plan.cuts), plan.costs, plan.cluster)
    bound = lower_bound(Problem(plan.costs, built.placement, count, plan.cluster, plan.cuts)).seconds
    return replace(plan, schedule=built, predicted=Prediction.of(trace, min(bound, trace.makespan)))


def unsplit(plan: Plan) -> Plan:
    """The same microbatches through one stage on one rank."""
    partition = Partition((tuple(node.name for node in plan.graph.nodes),))
    cluster, schedule = Cluster(1), build("gpipe", 1, plan.num_microbatches)
    # The one rank is like any other, whichever ranks of the plan are slow.
    alike = plan.costs_on(replace(plan.cluster, slowness=None))
    costs = StageCosts(
        forward=(sum(alike.forward),),
        input_grad=(sum(alike.input_grad),),
        weight_grad=(sum(alike.weight_grad),),
        activation_bytes=(sum(alike.activation_bytes),),
    )
    trace = simulate(lower(schedule), costs, cluster)
    choices = Choices("given", "gpipe", (False,), "loop")
    return Plan(plan.graph, partition, schedule, choices, costs, cluster, Prediction.of(trace, trace.makespan))
