"""Slow ranks: which ranks take longer than their plan says and longer than their peers do, step after step.

Of every kind of pass the shortest counts, against the costs of the plan: what others do to the core of a rank makes
some of its passes longer, a slow rank all of them. A step is slow for a rank that stands out in it both from its plan
and from the median of the other ranks. A rank is slow for which most of the last steps were, and all of these taken
together. If the plan is wrong about all ranks alike, none stands out; where it is a little wrong about one, what that
one has usually taken so far counts as well.
"""

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.ir import COMPUTE_KINDS, Kind, Plan, Trace, pass_seconds, stage_of

WINDOW, ENOUGH = 8, 6
"""a rank is slow for which so many of so many steps were"""
OVER_PLAN, OVER_PEERS, OVER_ONLY_PEER = 1.2, 1.35, 1.45
"""how many times the plan and the median of its peers a slow rank takes; one peer alone may itself be misjudged"""
OVER_USUAL, LEAST, MOST = 1.3, 1.1, 1.45
"""how many times its usual place among its peers, once that is known, and between which multiples of them"""
PLAN_HOLDS = 0.5
"""a plan that says more than twice of what is usual says nothing"""
MEMORY = 50
"""steps before the last ones of which the usual is the median, if they are as many as the last ones or more"""
CALL_SECONDS, LOST_SECONDS = 2e-4, 5e-4
"""what a pass takes beside its nodes, and what a slow rank loses with each: where passes are short, calls differ"""

Ratios = NDArray[np.float64]


@dataclass(frozen=True)
class SlowRank:
    """A rank that is slow, since when, and how many times longer it takes."""

    rank: int
    since: int
    """the step"""
    over_plan: float
    over_peers: float
    num_peers: int
    is_from_start: bool
    """whether it was never seen to be any faster"""

    def __str__(self) -> str:
        since = f"since step {self.since}"
        if self.is_from_start:
            since = "from the start, or the plan misjudges its stages"
        peers = f"{self.over_peers:.1f} times its {'peers' if self.num_peers > 1 else 'only peer'}"
        return f"rank {self.rank} is slow {since}: {self.over_plan:.1f} times the plan, {peers}"


class _Look(NamedTuple):
    """What a step, or several, say of every rank."""

    over_plan: Ratios
    over_peers: Ratios
    lost_seconds: Ratios
    """with each pass, beside its peers"""

    def slow(self, over_plan: Ratios, over_peers: Ratios) -> NDArray[np.bool_]:
        """Which ranks are beyond these limits."""
        is_beyond = (self.over_plan >= over_plan) & (self.over_peers >= over_peers)
        return is_beyond & (self.lost_seconds >= LOST_SECONDS)


class _Step(NamedTuple):
    """A step that was looked at."""

    number: int
    shortest: Ratios
    look: _Look
    is_slow: NDArray[np.bool_]


class SlowRanks:
    """Looks at every step of a training by a plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._is_warm = False
        self._first = 0
        self._steps: deque[_Step] = deque(maxlen=WINDOW)
        self._earlier: deque[_Look] = deque(maxlen=MEMORY)
        self._slow: dict[int, SlowRank] = {}

    @property
    def slow(self) -> tuple[SlowRank, ...]:
        """The ranks that are slow now."""
        return tuple(self._slow[rank] for rank in sorted(self._slow))

    def look(self, step: int, trace: Trace) -> tuple[SlowRank, ...]:
        """The ranks that this step shows to be slow, each told once until it has recovered.

        The first step is left out: it warms up what the others use.
        """
        if not self._is_warm or self._plan.num_ranks < 2:
            self._is_warm, self._first = True, step + 1
            return ()
        if len(self._steps) == WINDOW and not self._slow:
            self._earlier.append(self._steps[0].look)
        least = shortest(trace)
        look = self._look(trace, least)
        self._steps.append(_Step(step, least, look, look.slow(*self._limits())))
        times = np.sum([each.is_slow for each in self._steps], axis=0)
        for rank in [rank for rank in self._slow if times[rank] <= WINDOW - ENOUGH]:
            del self._slow[rank]
        suspects = [int(rank) for rank in np.flatnonzero(times >= ENOUGH) if rank not in self._slow]
        found = [each for rank in suspects for each in self._found(rank, trace)]
        self._slow |= {each.rank: each for each in found}
        return tuple(found)

    def _look(self, trace: Trace, least: Ratios) -> _Look:
        work = _Work.of(self._plan, trace, least)
        over_plan = work.taken / work.planned
        peers = np.array([np.median(np.delete(over_plan, rank)) for rank in range(len(over_plan))])
        return _Look(over_plan, over_plan / peers, (work.taken - peers * work.planned) / work.num_passes)

    def _limits(self) -> tuple[Ratios, Ratios]:
        """From where on each rank is slow, over the plan and over its peers."""
        ones, has_one_peer = np.ones(self._plan.num_ranks), self._plan.num_ranks == 2
        if len(self._earlier) < WINDOW:
            return OVER_PLAN * ones, (OVER_ONLY_PEER if has_one_peer else OVER_PEERS) * ones
        over_plan = np.median([look.over_plan for look in self._earlier], axis=0)
        over_peers = np.median([look.over_peers for look in self._earlier], axis=0)
        least = OVER_USUAL if has_one_peer else LEAST
        return OVER_PLAN * np.clip(over_plan, PLAN_HOLDS, 1), np.clip(OVER_USUAL * over_peers, least, MOST)

    def _found(self, rank: int, trace: Trace) -> list[SlowRank]:
        """The rank, unless the shortest of its passes in all of the slow steps were short enough."""
        steps = [step for step in self._steps if step.is_slow[rank]]
        look = self._look(trace, np.min([step.shortest for step in steps], axis=0))
        if not look.slow(*self._limits())[rank]:
            return []
        since, num_peers = steps[0].number, self._plan.num_ranks - 1
        over_plan = float(np.median([step.look.over_plan[rank] for step in steps]))
        over_peers = float(np.median([step.look.over_peers[rank] for step in steps]))
        return [SlowRank(rank, since, over_plan, over_peers, num_peers, since == self._first)]


def shortest(trace: Trace) -> Ratios:
    """Seconds of the shortest pass of every kind of every stage; infinite where there is none."""
    table = trace.program.table
    least = np.full((len(Kind), trace.program.num_stages), np.inf)
    passes = np.flatnonzero(np.isin(table.kinds, COMPUTE_KINDS))
    where = table.kinds[passes], stage_of(table.codes[passes])
    np.minimum.at(least, where, (trace.ends.values - trace.starts.values)[passes])
    return least


class _Work(NamedTuple):
    """Seconds of every rank in a step: as they would be if all passes were as short as the shortest, and as planned."""

    taken: Ratios
    planned: Ratios
    num_passes: Ratios

    @classmethod
    def of(cls, plan: Plan, trace: Trace, least: Ratios) -> "_Work":
        table = trace.program.table
        passes = np.flatnonzero(np.isin(table.kinds, COMPUTE_KINDS))
        ranks, num_ranks = table.rank_of[passes], plan.num_ranks
        taken = least[table.kinds[passes], stage_of(table.codes[passes])]
        planned = pass_seconds(table, plan.costs, plan.cluster.overlap)[passes] + CALL_SECONDS
        columns = (taken, planned, np.ones(len(passes)))
        return cls(*(np.bincount(ranks, each, num_ranks).astype(np.float64) for each in columns))
