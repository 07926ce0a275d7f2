"""Contents of reports that the tests look at: a plan of any size with costs, and a run that followed it."""

from dataclasses import replace

from penstock.ir import (
    Candidate,
    Choices,
    Cluster,
    Graph,
    Node,
    Partition,
    Plan,
    Prediction,
    Run,
    Search,
    StageCosts,
    StateBytes,
    StepMetrics,
    TensorSpec,
    Value,
)
from penstock.passes import lower
from penstock.schedules import build
from penstock.simulate import simulate
from penstock.views import Advice, Contents
from tests.views.samples import jittered

MIB = 2**20


def chain(num_nodes: int, name: str = "layers.{}") -> Graph:
    """Blocks one after the other, each with a weight."""
    made = [Value(name.format(place), TensorSpec((4, 8), requires_grad=True)) for place in range(num_nodes)]
    weights = tuple(Value(f"{value.name}.weight", TensorSpec((8, 8), requires_grad=True)) for value in made)
    nodes = [
        Node(value.name, (before.name,), (value,), (weight.name,), module=value.name, kind="Block", is_block=True)
        for value, weight, before in zip(made, weights, [Value("x", made[0].spec), *made], strict=False)
    ]
    return Graph(tuple(nodes), (Value("x", TensorSpec((4, 8))),), (made[-1].name,), weights)


def planned(
    schedule: str = "1f1b", ranks: int = 2, microbatches: int = 4, depth: int = 1, name: str = "layers.{}"
) -> Plan:
    """A plan with one block in every stage, the last of which costs half as much again."""
    stages = ranks * depth
    seconds = (0.01,) * (stages - 1) + (0.015,)
    costs = StageCosts(
        seconds, seconds, seconds, activation_bytes=(MIB,) * stages, state=(StateBytes(8 * MIB),) * stages
    )
    order = build(schedule, ranks, microbatches, depth, costs)
    graph, cluster = chain(stages, name), Cluster(ranks, memory="64MiB", latency=1e-3)
    partition = Partition(tuple((node.name,) for node in graph.nodes))
    predicted = Prediction.of(simulate(lower(order), costs, cluster), 0.05)
    choices = Choices("linear", schedule, (False,) * stages, "loop")
    slower = replace(predicted, makespan=2 * predicted.makespan)
    tried = (Candidate(choices, microbatches, 6, predicted), Candidate(choices, 2, 6, slower, "100 % slower: <waits>"))
    search = Search(tried, ("Rank 1 has the most work.",))
    return Plan(graph, partition, order, choices, costs, cluster, predicted, search)


def contents(plan: Plan | None = None, *, trained: bool = True) -> Contents:
    """What is shown of a plan; with a recorded step that took a little longer."""
    plan = plan or planned()
    predicted = simulate(lower(plan.schedule), plan.costs, plan.cluster)
    steps = tuple(StepMetrics(step, 6.0 - step / 4, 0.3 + step / 100, 32) for step in range(8))
    peaks = (20 * MIB,) * plan.num_ranks
    run = Run(plan, steps, (jittered(predicted),), peaks, 2.5e-7, (("torch", "2.13.0"),)) if trained else None
    advice = (Advice("schedule zb_h1", 0.1, 0.125, "another order"),)
    return Contents(plan, predicted, run, advice, "0123abcd", (("penstock", "0.1.0"),))
