"""Predicts when every action and every message of a Program happens.

Ranks and links are lines that do one thing at a time: a rank its passes in order, a link (one direction between two
ranks) its messages in the order of their Sends. A message leaves when its rank gets to the Send and the link is free,
occupies the link for bytes / bandwidth and has arrived one latency later; receives are posted ahead, so it does not
wait for them. Sends, receives and the like take no time of their rank. As every order is fixed, one walk gives all
times, unless there are more ranks than the cores that they share: see shared_cores.py. Replicas average the gradients
of a stage from its Reduce on, while the passes continue.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import CostError, ScheduleError
from penstock.ir import (
    COMPUTE_KINDS,
    Cluster,
    Fact,
    Kind,
    Needs,
    Program,
    Replicas,
    Series,
    StageCosts,
    Trace,
    look_up_seconds,
    microbatch_of,
    pack,
    pass_seconds,
    peer_of,
    stage_of,
    walk,
)
from penstock.simulate.memory import memory_curves
from penstock.simulate.shared_cores import Message, PassTimes, run_on_shared_cores

Indices = NDArray[np.int64]
Seconds = NDArray[np.float64]


def simulate(program: Program, costs: StageCosts | None = None, cluster: Cluster | None = None) -> Trace:
    """The predicted Trace. Without costs every pass takes one second; without a cluster messages take no time.

    The costs are those on the ranks that hold the stages: they include the slowness and the overhead of a rank.
    """
    costs = costs or StageCosts.uniform(program.num_stages)
    cluster = cluster or Cluster(program.num_ranks)
    if costs.num_stages != program.num_stages:
        raise CostError("costs must have the same number of stages", costs=costs.num_stages, program=program.num_stages)
    costs.check_microbatches(program.num_microbatches)
    if cluster.ranks != program.num_ranks:
        raise CostError(
            "the cluster must have the same number of ranks", cluster=cluster.ranks, program=program.num_ranks
        )
    _check_messages(program)
    messages = _find_messages(program, costs, cluster)
    computes = np.flatnonzero(np.isin(program.table.kinds, COMPUTE_KINDS))
    seconds = pass_seconds(program.table, costs, cluster.overlap)[computes]
    passes = _find_passes(program, computes, seconds, messages)
    if cluster.cores is not None and cluster.cores < program.num_ranks:
        times = _run_on_shared_cores(passes, messages, cluster.cores)
    else:
        times = _walk(passes, messages)
    if times is None:
        raise ScheduleError("the program cannot run to its end", hint="penstock.verify(program) shows where it blocks")
    # A pass has its own end; any other action ends with the pass before it on its rank.
    table = program.table
    latest = np.searchsorted(computes, np.arange(len(table.codes)), side="right") - 1
    first = np.searchsorted(computes, table.starts[table.rank_of])
    ends = np.where(latest >= first, times.ends[np.maximum(latest, 0)], 0.0)
    # Per action the end of the action before it on its rank: by rounding, `end - seconds` may be slightly earlier.
    previous = np.concatenate(([0.0], ends))
    previous[table.starts[:-1]] = 0.0
    starts = ends.copy()
    starts[computes] = np.maximum(times.starts, previous[:-1][computes])
    sent = np.maximum(times.arrived - messages.seconds - messages.latency, ends[messages.send])
    by_send = np.argsort(messages.send)
    # Ranks synchronise first.
    begin = cluster.overhead.step_seconds
    starts, ends = starts + begin, ends + begin
    memory = memory_curves(program, costs, starts, ends)
    starts, ends = _add_reductions(program, costs, cluster.replicas, starts, ends)
    return Trace(
        program,
        Series(starts),
        Series(ends),
        Series(sent[by_send] + begin),
        Series(times.arrived[by_send] + begin),
        memory,
    )


class Makespans:
    """Predicts the makespan of one program for many costs; everything that does not depend on them is found once.

    Called with the seconds by kind, stage and microbatch, and with the sizes of the messages of every microbatch as
    factors of those in `costs`. `simulate` with these costs gives the same makespan.
    """

    def __init__(self, program: Program, costs: StageCosts, cluster: Cluster) -> None:
        _check_messages(program)
        self._table, self._cluster = program.table, cluster
        self._messages = _find_messages(program, costs, cluster)
        self._microbatches = microbatch_of(program.table.codes[self._messages.send])
        self._computes = np.flatnonzero(np.isin(program.table.kinds, COMPUTE_KINDS))
        self._passes = _find_passes(program, self._computes, np.zeros(len(self._computes)), self._messages)
        self._lines, self._needs = _lines(self._passes, self._messages)
        self._tails = [0.0] * len(self._computes) + self._messages.latency.tolist()
        self._is_shared = cluster.cores is not None and cluster.cores < program.num_ranks

    @property
    def num_items(self) -> int:
        """Number of passes and messages, to which the time of a call is proportional."""
        return len(self._tails)

    def __call__(self, by_kind: Seconds, sizes: Seconds) -> float:
        """The makespan in seconds."""
        seconds = look_up_seconds(self._table, by_kind, self._cluster.overlap)[self._computes]
        occupied = self._messages.seconds * sizes[self._microbatches]
        if self._is_shared:
            assert self._cluster.cores is not None
            passes, messages = self._passes._replace(seconds=seconds), self._messages._replace(seconds=occupied)
            times = _run_on_shared_cores(passes, messages, self._cluster.cores)
            ends = None if times is None else times.ends
        else:
            result = walk(self._lines, self._needs, [*seconds.tolist(), *occupied.tolist()], self._tails)
            ends = result.ends[: len(seconds)] if result.finished else None
        if ends is None:
            raise ScheduleError("the program cannot run to its end", hint="penstock.verify(program) shows where")
        return float(ends.max())


def _check_messages(program: Program) -> None:
    """Raise if a rank does not wait for something that it needs, which would make the program look fast."""
    table, dependencies = program.table, program.dependencies()
    own = table.rank_of[dependencies.waiter] == table.rank_of[dependencies.needed]
    sends = table.codes[table.kinds == Kind.SEND]
    crossing = dependencies.where(~own)
    needed = pack(Kind.SEND, crossing.source, crossing.microbatch, crossing.target)
    is_late = own & (dependencies.needed >= dependencies.waiter)
    if (dependencies.needed < 0).any() or is_late.any() or not np.array_equal(np.sort(sends), np.sort(needed)):
        raise ScheduleError(
            "the program does not make and send everything that its actions need",
            sends=len(sends),
            needed=len(needed),
            hint="penstock.verify(program) shows what is missing",
        )


class _Messages(NamedTuple):
    """The messages of a program, link by link in the order of their Sends."""

    send: Indices
    """index of the Send"""
    user: Indices
    """index of the pass that uses the values"""
    link_starts: Indices
    """the first message of each link"""
    seconds: Seconds
    latency: Seconds


def _find_messages(program: Program, costs: StageCosts, cluster: Cluster) -> _Messages:
    table, ranks = program.table, np.asarray(program.placement.ranks)
    send = np.flatnonzero(table.kinds == Kind.SEND)
    source, target = stage_of(table.codes[send]), peer_of(table.codes[send])
    link = ranks[source] * program.num_ranks + ranks[target]
    by_link = np.argsort(link, kind="stable")
    send, source, target, link = send[by_link], source[by_link], target[by_link], link[by_link]
    names, link_starts, which = np.unique(link, return_index=True, return_inverse=True)
    rates = cluster.link_rates(names // program.num_ranks, names % program.num_ranks)[which]
    makers, microbatch = program.makers, microbatch_of(table.codes[send])
    user = np.where(
        target > source, makers[Fact.OUTPUT][target, microbatch], makers[Fact.INPUT_GRADIENT][target, microbatch]
    )
    seconds = rates.occupied(costs.message_bytes(source, target))
    return _Messages(send, user, link_starts, seconds, rates.latency)


class _Passes(NamedTuple):
    """The passes of a program, rank by rank in order, and the passes between which each message travels."""

    starts: Indices
    """the first pass of each rank"""
    seconds: Seconds
    before_send: Indices
    """per message the last pass of its rank before its Send; -1 if there is none"""
    user: Indices
    """per message the pass that uses it"""


def _find_passes(program: Program, computes: Indices, seconds: Seconds, messages: _Messages) -> _Passes:
    table = program.table
    number = np.full(len(table.codes), -1, dtype=np.int64)
    number[computes] = np.arange(len(computes))
    starts = np.searchsorted(computes, table.starts)
    before_send = np.searchsorted(computes, messages.send) - 1
    before_send[before_send < starts[table.rank_of[messages.send]]] = -1
    return _Passes(starts, seconds, before_send, number[messages.user])


def _walk(passes: _Passes, messages: _Messages) -> PassTimes | None:
    """The times if every rank has its own core: ranks and links are the lines of one walk. None if they block."""
    lines, needs = _lines(passes, messages)
    num_passes = len(passes.seconds)
    seconds = np.concatenate((passes.seconds, messages.seconds))
    tails = np.concatenate((np.zeros(num_passes), messages.latency))
    result = walk(lines, needs, seconds.tolist(), tails.tolist())
    ends = result.ends[:num_passes]
    return PassTimes(ends - passes.seconds, ends, result.ends[num_passes:]) if result.finished else None


def _lines(passes: _Passes, messages: _Messages) -> tuple[list[int], Needs]:
    """The first item of every rank and link, and what each item needs: items are the passes, then the messages."""
    num_passes, num_messages = len(passes.seconds), len(messages.send)
    number, has_before = num_passes + np.arange(num_messages), passes.before_send >= 0
    needs = Needs.of(
        num_passes + num_messages,
        np.concatenate((number[has_before], passes.user)),
        np.concatenate((passes.before_send[has_before], number)),
    )
    lines = (*passes.starts[:-1], *(num_passes + messages.link_starts), num_passes + num_messages)
    return [int(start) for start in lines], needs


def _run_on_shared_cores(passes: _Passes, messages: _Messages, cores: int) -> PassTimes | None:
    link = np.searchsorted(messages.link_starts, np.arange(len(messages.send)), side="right")
    columns = (passes.before_send, passes.user, link, messages.seconds, messages.latency)
    rows = list(map(Message, *(column.tolist() for column in columns)))
    return run_on_shared_cores(cores, passes.starts.tolist(), passes.seconds.tolist(), rows)


def _add_reductions(
    program: Program, costs: StageCosts, replicas: Replicas, starts: Seconds, ends: Seconds
) -> tuple[Seconds, Seconds]:
    """Starts and ends with the time of every Reduce: a rank reduces one stage after another beside its passes."""
    places = np.flatnonzero(program.table.kinds == Kind.REDUCE)
    if replicas.count == 1 or not len(places):
        return starts, ends
    starts, ends = starts.copy(), ends.copy()
    free = [0.0] * program.num_ranks
    for place in places.tolist():
        rank = int(program.table.rank_of[place])
        stage = int(stage_of(program.table.codes[place]))
        starts[place] = max(ends[place], free[rank])
        ends[place] = free[rank] = starts[place] + replicas.reduction_seconds(costs.state[stage].gradients)
    return starts, ends
