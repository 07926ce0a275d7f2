"""The problem of finding an order.

If all microbatches cost the same, for any order there is one as good in which every stage takes them in turn: its k-th
forward is that of microbatch k, and so are its k-th input gradient and its k-th weight gradient (sorting each row of
starts keeps every inequality between rows). The order of a rank is then a list of *pass ids*, each a stage and a kind
of pass without a microbatch. Microbatches of unequal costs are taken in turn as well, in the given order; bounds hold
for any order of them.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from penstock.errors import CostError, ScheduleError
from penstock.ir import (
    MAX_MICROBATCHES,
    PASS_KINDS,
    Cluster,
    Cuts,
    Fact,
    Forward,
    InputGrad,
    Orders,
    Placement,
    Schedule,
    StageCosts,
    choices_text,
    is_count,
    kind_of,
    needs,
    number_microbatches,
    pack,
    stage_of,
)

OBJECTIVES = ("makespan", "span")

RankOrder = list[int]
"""the pass ids of a rank in order; a pass id is `stage << 2 | kind`"""
RankOrders = list[RankOrder]
"""one per rank"""

# The kinds of a pass id: forward, backward, input gradient and weight gradient, as numbers below 4.
F, B, I, W = map(int, PASS_KINDS)  # noqa: E741


class OutgoingMessage(NamedTuple):
    """A message that a pass of one stage sends to another stage."""

    target: int
    """the receiving stage"""
    link: int
    """-1 between stages of one rank"""
    occupied: float
    """seconds for which it occupies the link"""
    latency: float


@dataclass(frozen=True)
class ScheduleProblem:
    """Stages with costs, on ranks with memory and links, whose passes are to be ordered.

    `objective` is the length to shorten: the makespan of a step, or its span, the measure of the zero-bubble papers.
    Properties give costs and messages as plain tuples, by pass id or by stage, for the inner loops of searches.
    """

    costs: StageCosts
    placement: Placement
    num_microbatches: int
    cluster: Cluster
    cuts: Cuts
    objective: str = "makespan"

    def __post_init__(self) -> None:
        if not is_count(self.num_microbatches, MAX_MICROBATCHES):
            problem = f"microbatches must be a whole number from 1 to {MAX_MICROBATCHES}"
            raise ScheduleError(problem, got=repr(self.num_microbatches))
        if self.objective not in OBJECTIVES:
            raise ScheduleError(f"objective must be {choices_text(OBJECTIVES)}", got=repr(self.objective))
        stages = {"costs": self.costs.num_stages, "placement": self.placement.num_stages, "cuts": self.cuts.num_stages}
        if len(set(stages.values())) > 1:
            raise CostError("costs, placement and cuts must have the same number of stages", hint="", **stages)
        self.costs.check_microbatches(self.num_microbatches)
        if self.cluster.ranks != self.placement.num_ranks:
            raise CostError(
                "cluster and placement must have the same number of ranks",
                cluster=self.cluster.ranks,
                placement=self.placement.num_ranks,
            )

    @classmethod
    def of(
        cls, costs: StageCosts, placement: Placement, num_microbatches: int, cluster: Cluster | None = None
    ) -> "ScheduleProblem":
        """Returns the problem of a chain of stages; without a cluster there are no limits and messages take no time."""
        cluster = cluster or Cluster(placement.num_ranks)
        return cls(costs, placement, num_microbatches, cluster, Cuts.chain(placement.num_stages))

    @property
    def num_passes(self) -> int:
        """Number of passes of an order in which every backward is split."""
        return 3 * self.placement.num_stages * self.num_microbatches

    @property
    def step_seconds(self) -> float:
        """The part of the length that no order changes: the overhead of a step, which a span does not include."""
        return self.cluster.overhead.step_seconds if self.objective == "makespan" else 0.0

    @cached_property
    def room(self) -> tuple[float, ...]:
        """Bytes per rank left for activations: its memory less the state of its stages; inf without a limit."""
        limits = self.cluster.limits or (float("inf"),) * self.cluster.ranks
        return tuple(
            limit - sum(self.costs.state[stage].total for stage in stages)
            for limit, stages in zip(limits, self.placement.stages, strict=True)
        )

    @cached_property
    def seconds(self) -> tuple[float, ...]:
        """Seconds of a pass, by pass id; the mean if microbatches differ."""
        rows = zip(*(self.costs.mean_seconds(kind) for kind in PASS_KINDS), strict=True)
        return tuple(float(each) for row in rows for each in row)

    @cached_property
    def unequal_seconds(self) -> tuple[tuple[float, ...], ...] | None:
        """Seconds of a pass by pass id and microbatch; None if microbatches do not differ."""
        if self.costs.num_microbatches is None:
            return None
        rows = zip(*(self.costs.seconds(kind).tolist() for kind in PASS_KINDS), strict=True)
        return tuple(tuple(each) for row in rows for each in row)

    @cached_property
    def allocated(self) -> tuple[float, ...]:
        """Bytes that a pass allocates, by pass id; below 0 it frees them. The most if microbatches differ."""
        most = self.costs.most()
        return tuple(np.concatenate([most.allocated(kind) for kind in PASS_KINDS], axis=1).ravel().tolist())

    @property
    def outputs(self) -> tuple[tuple[OutgoingMessage, ...], ...]:
        """By stage, where its output goes."""
        return self._messages[0]

    @property
    def gradients(self) -> tuple[tuple[OutgoingMessage, ...], ...]:
        """By stage, where its input gradient goes."""
        return self._messages[1]

    @cached_property
    def num_links(self) -> int:
        """Number of links between ranks that messages use."""
        return 1 + max((each.link for side in self._messages for sent in side for each in sent), default=-1)

    @cached_property
    def _messages(self) -> tuple[tuple[tuple[OutgoingMessage, ...], ...], tuple[tuple[OutgoingMessage, ...], ...]]:
        """Outputs and gradients, from `needs`, which defines all dependencies."""
        stages, links = range(self.placement.num_stages), dict[tuple[int, int], int]()
        # Pairs of a source and a target stage.
        forward = sorted((need.stage, stage) for stage in stages for need in needs(Forward(stage, 0), self.cuts))
        backward = [
            (need.stage, stage)
            for stage in stages
            for need in needs(InputGrad(stage, 0), self.cuts)
            if need.fact is Fact.INPUT_GRADIENT
        ]
        ranks = np.array(self.placement.ranks)
        found = []
        for pairs in (forward, backward):
            source, target = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
            rates = self.cluster.link_rates(ranks[source], ranks[target])
            seconds = rates.occupied(self.costs.message_bytes(source, target)).tolist()
            sent: list[list[OutgoingMessage]] = [[] for _ in stages]
            for (producer, consumer), occupied, latency in zip(pairs, seconds, rates.latency.tolist(), strict=True):
                way = self.placement[producer], self.placement[consumer]
                message = OutgoingMessage(consumer, -1, 0.0, 0.0)
                if way[0] != way[1]:
                    message = OutgoingMessage(consumer, links.setdefault(way, len(links)), occupied, latency)
                sent[producer].append(message)
            found.append(tuple(map(tuple, sent)))
        return found[0], found[1]


def rank_orders(schedule: Schedule) -> RankOrders:
    """Returns the pass ids of a schedule; overlapped pairs are taken apart."""
    whole = schedule.table.select_passes(np.ones(len(schedule.table.passes.index), dtype=np.bool_))
    return [(stage_of(codes) << 2 | kind_of(codes)).tolist() for codes in map(whole.rank, range(len(whole)))]


def to_schedule(problem: ScheduleProblem, orders: RankOrders) -> Schedule:
    """Returns the schedule of rank orders, with microbatches numbered by counting."""
    ids = [np.asarray(order, dtype=np.int64) for order in orders]
    table = Orders([number_microbatches(pack(each & 3, each >> 2)) for each in ids])
    return Schedule(problem.placement, problem.num_microbatches, table)


def peak_bytes(problem: ScheduleProblem, order: RankOrder) -> float:
    """Returns the most bytes of activations that an order holds."""
    held = most = 0.0
    for pass_id in order:
        held += problem.allocated[pass_id]
        most = max(most, held)
    return most
