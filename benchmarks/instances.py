"""Small schedule problems with integer costs, which the exact solver needs, for tests and benchmarks."""

from random import Random
from typing import NamedTuple

from penstock.ir import Cluster, Placement, StageCosts
from penstock.planner import ScheduleProblem

KINDS = ("balanced", "last", "middle", "random")
SHAPES = ((1, "loop"), (2, "vee"), (2, "loop"))


class Instance(NamedTuple):
    """The parameters of a problem; `memory` is in microbatches, `kind` is one of KINDS, `shape` "loop" or "vee"."""

    ranks: int
    microbatches: int
    stages_per_rank: int
    shape: str
    kind: str
    memory: int
    latency: int
    seed: int

    @property
    def num_passes(self) -> int:
        """The number of forwards, input gradients and weight gradients."""
        return 3 * self.ranks * self.stages_per_rank * self.microbatches

    @property
    def problem(self) -> ScheduleProblem:
        """The schedule problem with these parameters."""
        is_vee = self.shape == "vee"
        placement = Placement.vee(self.ranks) if is_vee else Placement.loop(self.ranks, self.stages_per_rank)
        costs = _costs(self.kind, placement.num_stages, self.seed)
        cluster = Cluster(self.ranks, memory=self.memory * self.stages_per_rank, latency=float(self.latency))
        return ScheduleProblem.of(costs, placement, self.microbatches, cluster)


def instances(count: int, seed: int, most_ranks: int = 4, microbatches: tuple[int, int] = (4, 8)) -> list[Instance]:
    """Returns random instances, cycling through KINDS, with the memory of 1f1b or less."""
    random = Random(seed)
    found = []
    for place in range(count):
        ranks = random.randint(2, most_ranks)
        stages_per_rank, shape = random.choice(SHAPES)
        memory = random.choice((ranks, ranks, max(ranks - 1, 1), (ranks + 1) // 2))
        kind, latency = KINDS[place % len(KINDS)], random.choice((0, 0, 0, 1))
        number = random.randint(*microbatches)
        found.append(Instance(ranks, number, stages_per_rank, shape, kind, memory, latency, place))
    return found


def _costs(kind: str, num_stages: int, seed: int) -> StageCosts:
    """Each stage keeps one byte per microbatch until its weight gradient."""
    random, weight = Random(seed), [2] * num_stages
    if kind == "random":
        forward, inputs = ([random.randint(2, 6) for _ in weight] for _ in range(2))
        return StageCosts(forward, inputs, [random.randint(1, 5) for _ in weight], activation_bytes=(1,) * num_stages)
    if kind != "balanced":
        weight[-1 if kind == "last" else num_stages // 2] = 4
    return StageCosts(weight, weight, weight, activation_bytes=(1,) * num_stages)
