"""Detects ranks that take longer than planned and longer than their peers, and finds a plan that would help.

The shortest pass of every kind is compared with the costs of the plan: other processes on the core of a rank make some
of its passes longer, a slow rank makes all of them longer. A step is slow for a rank that exceeds both its plan and the
median of the other ranks by a factor. A rank is slow if most of the last steps were slow, and so are these steps taken
together. Errors of the plan that affect all ranks equally have no effect; errors that affect one rank are corrected by
its usual ratio to its peers so far.
"""

import math
from collections import deque
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np

from penstock.ir import (
    COMPUTE_KINDS,
    NODE_SECONDS,
    Bools,
    Floats,
    Kind,
    Node,
    NodeBytes,
    NodeCost,
    Plan,
    Profile,
    StageCosts,
    Trace,
    pass_seconds,
    seconds_text,
    stage_of,
)
from penstock.passes import lower
from penstock.planner.candidates import Measured
from penstock.planner.options import AUTO, PlanOptions
from penstock.planner.plan_search import search
from penstock.schedules import SCHEDULES
from penstock.simulate import simulate

WINDOW_STEPS, MIN_SLOW_STEPS = 8, 6
"""a rank is slow if MIN_SLOW_STEPS of the last WINDOW_STEPS were"""
OVER_PLAN, OVER_PEERS, OVER_ONLY_PEER = 1.2, 1.35, 1.45
"""how many times the plan and the median of its peers a slow rank takes; a single peer may itself be misjudged"""
OVER_USUAL, MIN_OVER_PEERS, MAX_OVER_PEERS = 1.3, 1.1, 1.45
"""how many times its usual ratio to its peers, once that is known, clipped to between MIN_OVER_PEERS (with one peer:
OVER_USUAL) and MAX_OVER_PEERS times the peers"""
MIN_USUAL_RATIO = 0.5
"""the smallest usual ratio to the plan by which OVER_PLAN is multiplied: the plan may overestimate all passes"""
HISTORY_STEPS = 50
"""steps before the last WINDOW_STEPS whose median is the usual ratio; at least WINDOW_STEPS of them are needed"""
CALL_SECONDS, MIN_LOST_SECONDS = 2e-4, 5e-4
"""overhead of a pass, and the least that a slow rank loses with each: where passes are short, overheads differ"""
REPLAN_SECONDS = 1.0
"""budget of the search for a plan that would help"""
MAX_PASSES = 10_000
"""passes of a plan above which a new search would take too long"""
_WORTH = 0.02
"""share by which a new plan must shorten the step"""
_FIELDS_OF_COMMAND = ("ranks", "memory", "latency", "bandwidth", "cores", "slowness", "overhead")
"""the fields of a Cluster that `penstock plan` has options for, or measures itself"""


@dataclass(frozen=True)
class SlowRank:
    """A rank that is slow, since when, and by how much."""

    rank: int
    since: int
    """the step"""
    over_plan: float
    over_peers: float
    num_peers: int
    is_from_start: bool
    """whether it has been slow in all steps so far"""

    def __str__(self) -> str:
        since = f"since step {self.since}"
        if self.is_from_start:
            since = "from the start, or the plan misjudges its stages"
        peers = f"{self.over_peers:.1f} times its {'peers' if self.num_peers > 1 else 'only peer'}"
        return f"rank {self.rank} is slow {since}: {self.over_plan:.1f} times the plan, {peers}"


class _Ratios(NamedTuple):
    """How every rank compares with the plan and with its peers, in one step or in several."""

    over_plan: Floats
    over_peers: Floats
    lost_seconds: Floats
    """per pass, compared with its peers"""

    def slow(self, over_plan: Floats, over_peers: Floats) -> Bools:
        """Returns which ranks are beyond these limits."""
        is_beyond = (self.over_plan >= over_plan) & (self.over_peers >= over_peers)
        return is_beyond & (self.lost_seconds >= MIN_LOST_SECONDS)


class _Step(NamedTuple):
    number: int
    shortest: Floats
    """seconds of the shortest pass of every kind of every stage"""
    ratios: _Ratios
    is_slow: Bools


class SlowRankDetector:
    """Finds slow ranks from the traces of the steps of a plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._is_warm = False
        self._first = 0
        self._steps: deque[_Step] = deque(maxlen=WINDOW_STEPS)
        self._earlier: deque[_Ratios] = deque(maxlen=HISTORY_STEPS)
        self._slow: dict[int, SlowRank] = {}

    @property
    def slow(self) -> tuple[SlowRank, ...]:
        """The ranks that are slow now."""
        return tuple(self._slow[rank] for rank in sorted(self._slow))

    def observe(self, step: int, trace: Trace) -> tuple[SlowRank, ...]:
        """Returns the ranks that this step shows to be slow, each once until it has recovered.

        The first step is skipped: it warms up caches.
        """
        if not self._is_warm or self._plan.num_ranks < 2:
            self._is_warm, self._first = True, step + 1
            return ()
        if len(self._steps) == WINDOW_STEPS and not self._slow:
            self._earlier.append(self._steps[0].ratios)
        table = trace.program.table
        shortest = np.full((len(Kind), trace.program.num_stages), np.inf)
        passes = np.flatnonzero(np.isin(table.kinds, COMPUTE_KINDS))
        where = table.kinds[passes], stage_of(table.codes[passes])
        np.minimum.at(shortest, where, trace.durations[passes])
        ratios = self._ratios(trace, shortest)
        self._steps.append(_Step(step, shortest, ratios, ratios.slow(*self._limits())))
        times = np.sum([each.is_slow for each in self._steps], axis=0)
        for rank in [rank for rank in self._slow if times[rank] <= WINDOW_STEPS - MIN_SLOW_STEPS]:
            del self._slow[rank]
        suspects = [int(rank) for rank in np.flatnonzero(times >= MIN_SLOW_STEPS) if rank not in self._slow]
        found = [each for rank in suspects if (each := self._confirm(rank, trace)) is not None]
        self._slow |= {each.rank: each for each in found}
        return tuple(found)

    def _ratios(self, trace: Trace, shortest: Floats) -> _Ratios:
        """Compares ranks as if all passes were as short as the shortest of their kind."""
        table = trace.program.table
        passes = np.flatnonzero(np.isin(table.kinds, COMPUTE_KINDS))
        seconds = shortest[table.kinds[passes], stage_of(table.codes[passes])]
        expected = pass_seconds(table, self._plan.costs, self._plan.cluster.overlap)[passes] + CALL_SECONDS
        taken, planned, count = (
            np.bincount(table.rank_of[passes], each, self._plan.num_ranks).astype(np.float64)
            for each in (seconds, expected, np.ones(len(passes)))
        )
        over_plan = taken / planned
        peers = np.array([np.median(np.delete(over_plan, rank)) for rank in range(len(over_plan))])
        return _Ratios(over_plan, over_plan / peers, (taken - peers * planned) / count)

    def _limits(self) -> tuple[Floats, Floats]:
        """The ratios to the plan and to its peers from which each rank is slow."""
        ones, has_one_peer = np.ones(self._plan.num_ranks), self._plan.num_ranks == 2
        if len(self._earlier) < WINDOW_STEPS:
            return OVER_PLAN * ones, (OVER_ONLY_PEER if has_one_peer else OVER_PEERS) * ones
        over_plan = np.median([ratios.over_plan for ratios in self._earlier], axis=0)
        over_peers = np.median([ratios.over_peers for ratios in self._earlier], axis=0)
        least = OVER_USUAL if has_one_peer else MIN_OVER_PEERS
        over_plan = OVER_PLAN * np.clip(over_plan, MIN_USUAL_RATIO, 1)
        return over_plan, np.clip(OVER_USUAL * over_peers, least, MAX_OVER_PEERS)

    def _confirm(self, rank: int, trace: Trace) -> SlowRank | None:
        """The rank, unless the shortest of its passes in all of the slow steps were short enough."""
        steps = [step for step in self._steps if step.is_slow[rank]]
        ratios = self._ratios(trace, np.min([step.shortest for step in steps], axis=0))
        if not ratios.slow(*self._limits())[rank]:
            return None
        since, num_peers = steps[0].number, self._plan.num_ranks - 1
        over_plan = float(np.median([step.ratios.over_plan[rank] for step in steps]))
        over_peers = float(np.median([step.ratios.over_peers[rank] for step in steps]))
        return SlowRank(rank, since, over_plan, over_peers, num_peers, since == self._first)


class SlowRankAdvisor:
    """Reports slow ranks during training, with the plan that would help; used on one rank."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._detector = SlowRankDetector(plan)

    def observe(self, step: int, trace: Trace) -> str:
        """Returns a sentence if a step shows a rank to be slow, else an empty string.

        Searching for a new plan takes about a second, once for every rank that becomes slow.
        """
        found = self._detector.observe(step, trace)
        if not found:
            return ""
        # Advice is optional: no error here may end the training.
        try:
            advice = replan(self._plan, self.slowness)
        except Exception:
            advice = None
        text = str(advice) if advice is not None else f"to plan for that: {plan_command(self._plan, self.slowness)}"
        return f"{'; '.join(map(str, found))}; {text}"

    @property
    def slowness(self) -> tuple[float, ...]:
        """How many times longer each rank takes than the profile states: as planned, times the ratios of slow ranks."""
        factors = list(self._plan.cluster.slowness or (1.0,) * self._plan.num_ranks)
        for each in self._detector.slow:
            factors[each.rank] *= each.over_peers
        return tuple(round(factor, 1) for factor in factors)


@dataclass(frozen=True)
class Replan:
    """Predicted seconds of a step on ranks some of which are slow."""

    present: float
    """with the present plan"""
    possible: float
    """with one that was searched for these ranks"""
    command: str
    """to make that plan"""

    @property
    def helps(self) -> bool:
        """Whether a new plan is worth it."""
        return self.possible <= (1 - _WORTH) * self.present

    def __str__(self) -> str:
        if not self.helps:
            return f"no plan was found that would help: a step takes about {seconds_text(self.present, 3)} with any"
        seconds = f"about {seconds_text(self.possible, 3)} instead of {seconds_text(self.present, 3)}"
        return f"a plan for that takes {seconds} a step: {self.command}"


def replan(plan: Plan, slowness: tuple[float, ...], budget_seconds: float = REPLAN_SECONDS) -> Replan | None:
    """Searches for a plan for ranks of that slowness; returns None if the plan is too large to search in that time.

    A plan stores no profile, so the costs of nodes are estimated; the cost of recomputed stages is assumed to stay with
    their nodes.
    """
    if len(plan.schedule.table.codes) > MAX_PASSES:
        return None
    cluster = replace(plan.cluster, slowness=slowness)
    present = simulate(lower(plan.orders, cuts=plan.cuts), plan.costs_on(cluster), cluster).makespan
    profile = estimate_profile(plan, plan.costs_on(plan.cluster.with_ideal_ranks()))
    models = {plan.num_microbatches: Measured(plan.graph, profile)}
    asked = _asked_schedule(plan)
    options = PlanOptions(cluster, schedule=asked, budget_seconds=budget_seconds, training=plan.training)
    return Replan(present, search(models, options).predicted.makespan, plan_command(plan, slowness))


def plan_command(plan: Plan, slowness: tuple[float, ...]) -> str:
    """Returns the command, or the call where the command line has no options for it, to plan for that slowness."""
    cluster, factors = plan.cluster, ",".join(f"{factor:g}" for factor in slowness)
    others = [each for each in fields(cluster) if each.name not in (*_FIELDS_OF_COMMAND, "replicas")]
    if cluster.replicas.count > 1 or any(getattr(cluster, each.name) != each.default for each in others):
        return f"penstock.plan(..., ranks=dataclasses.replace(plan.cluster, slowness=({factors})))"
    schedule = _asked_schedule(plan)
    options = {
        "ranks": plan.num_ranks,
        "microbatches": plan.num_microbatches,
        "slowness": factors,
        "schedule": schedule if schedule != AUTO else None,
        "memory": min(cluster.limits, default=None),
        "recompute": "auto" if any(plan.choices.recompute) else None,
        "cores": cluster.cores,
        "latency": cluster.latency or None,
        "bandwidth": cluster.bandwidth,
    }
    words = [f"--{name} {value}" for name, value in options.items() if value is not None]
    return f"penstock plan MODEL {' '.join(words)} --out plan.json"


def _asked_schedule(plan: Plan) -> str:
    """The requested name; "auto" for a schedule that was searched for or given."""
    asked = dict(plan.search.asked).get("schedule", AUTO)
    return asked if asked in SCHEDULES else AUTO


def estimate_profile(plan: Plan, costs: StageCosts) -> Profile:
    """Returns a profile of the plan's graph from the costs of its stages.

    The seconds of a stage are divided among its nodes in proportion to the estimated work of each: the elements that it
    makes, times the inputs of its weight matrices per element. Sums per stage are exact; inside a stage it is an
    estimate.
    """
    shapes = {value.name: value.spec.shape for value in plan.graph.parameters}

    def work(node: Node) -> float:
        made = max((math.prod(value.spec.shape) for value in node.makes), default=0)
        # Input-only nodes run wherever they are read, and cost little. A node that reads integers looks up rows of its
        # matrix.
        if node.from_inputs or any(plan.graph.spec(name).is_integer for name in node.reads):
            return 0.0 if node.from_inputs else float(made)
        matrices = (shapes[name] for name in node.parameters if len(shapes.get(name, ())) > 1)
        return float(made * (1 + sum(math.prod(shape[1:]) for shape in matrices)))

    found: dict[str, NodeCost] = {}
    mean, most = costs.mean(), costs.most()
    kept, late = most.allocated(Kind.FORWARD), -most.allocated(Kind.WEIGHT_GRAD)
    for stage, names in enumerate(plan.partition.stages):
        amounts = {name: work(plan.graph[name]) for name in names}
        total = math.fsum(amounts.values())
        seconds = {name: getattr(mean, name)[stage] for name in NODE_SECONDS}
        if not seconds["input_grad"]:
            # The first stage returns no gradient; its nodes would in another stage.
            seconds["input_grad"] = seconds["weight_grad"] = seconds["backward"] / 2
        for name, amount in amounts.items():
            share = amount / total if total else 1 / len(names)
            memory = NodeBytes(
                kept=int(share * float(kept[stage, 0])), kept_for_weight_grad=int(share * float(late[stage, 0]))
            )
            found[name] = NodeCost(name, **{each: share * value for each, value in seconds.items()}, memory=memory)
    node_costs = tuple(found[node.name] for node in plan.graph.nodes)
    step_seconds = math.fsum(cost.seconds for cost in node_costs)
    return Profile(node_costs, step_seconds, plan.graph.fingerprint, "estimated from the stages of a plan")
