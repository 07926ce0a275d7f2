"""Predicts when every action and every message of a Program happens.

Ranks and links are lines that do one thing at a time: a rank its passes in order, a link (one direction between two
ranks) its messages in the order of their Sends. A message leaves when its rank gets to the Send and the link is free,
occupies the link for bytes / bandwidth and has arrived one latency later; receives are posted ahead, so it does not
wait for them. Sends, receives and the like take no time of their rank. As every order is fixed, one walk gives all
times, unless there are more ranks than the cores that they share: see shared_cores.py. Replicas average the gradients
of a stage from its Reduce on, while the passes continue.
"""

from functools import cached_property
from typing import NamedTuple

import numpy as np

from penstock.errors import CostError, ScheduleError
from penstock.ir import (
    COMPUTE_KINDS,
    Cluster,
    Floats,
    Ints,
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
    order = _FixedOrder(program, costs, cluster)
    computes, messages = order.computes, order.messages
    times = order.run(pass_seconds(program.table, costs, cluster.overlap)[computes], messages.seconds)
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
    factors of those in `costs`. `simulate` gives the same makespan, except for the overhead of a step and for
    reductions over replicas.
    """

    def __init__(self, program: Program, costs: StageCosts, cluster: Cluster) -> None:
        self._table, self._overlap = program.table, cluster.overlap
        self._order = _FixedOrder(program, costs, cluster)
        self._microbatches = microbatch_of(program.table.codes[self._order.messages.send])

    @property
    def num_items(self) -> int:
        """Number of passes and messages, to which the time of a call is proportional."""
        return len(self._order.computes) + len(self._microbatches)

    def __call__(self, by_kind: Floats, size_factors: Floats) -> float:
        """The makespan in seconds; `size_factors` has an entry per microbatch."""
        seconds = look_up_seconds(self._table, by_kind, self._overlap)[self._order.computes]
        occupied = self._order.messages.seconds * size_factors[self._microbatches]
        return float(self._order.run(seconds, occupied).ends.max())


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

    send: Ints
    """index of the Send"""
    before_send: Ints
    """the last pass of its rank before the Send; -1 if there is none"""
    user: Ints
    """the pass that uses the values"""
    link: Ints
    seconds: Floats
    """for which it occupies its link"""
    latency: Floats


class _FixedOrder:
    """The passes of a program, numbered rank by rank in order, and its messages; `run` finds their times."""

    def __init__(self, program: Program, costs: StageCosts, cluster: Cluster) -> None:
        _check_messages(program)
        table, ranks = program.table, np.asarray(program.placement.ranks)
        self.computes = np.flatnonzero(np.isin(table.kinds, COMPUTE_KINDS))
        """the index of every pass"""
        self._rank_starts = np.searchsorted(self.computes, table.starts)
        is_shared = cluster.cores is not None and cluster.cores < program.num_ranks
        self._cores = cluster.cores if is_shared else None
        send = np.flatnonzero(table.kinds == Kind.SEND)
        link = table.rank_of[send] * program.num_ranks + ranks[peer_of(table.codes[send])]
        by_link = np.argsort(link, kind="stable")
        send = send[by_link]
        names, self._link_starts, which = np.unique(link[by_link], return_index=True, return_inverse=True)
        rates = cluster.link_rates(names // program.num_ranks, names % program.num_ranks)[which]
        before_send = np.searchsorted(self.computes, send) - 1
        before_send[before_send < self._rank_starts[table.rank_of[send]]] = -1
        source, target, microbatch = (of(table.codes[send]) for of in (stage_of, peer_of, microbatch_of))
        self.messages = _Messages(
            send,
            before_send,
            np.searchsorted(self.computes, program.makers.users(source, target, microbatch)),
            which,
            rates.occupied(costs.message_bytes(source, target)),
            rates.latency,
        )

    def run(self, seconds: Floats, occupied: Floats) -> PassTimes:
        """The times of all passes and messages: `seconds` per pass, `occupied` seconds of its link per message.

        Raises:
            ScheduleError: if the order blocks
        """
        times: PassTimes | None
        if self._cores is not None:
            _, *columns = self.messages._replace(seconds=occupied)
            rows = list(map(Message, *(column.tolist() for column in columns)))
            times = run_on_shared_cores(self._cores, self._rank_starts.tolist(), seconds.tolist(), rows)
        else:
            starts, needs, tails = self._lines
            walked = walk(starts, needs, [*seconds.tolist(), *occupied.tolist()], tails)
            ends, arrived = walked.ends[: len(seconds)], walked.ends[len(seconds) :]
            times = PassTimes(ends - seconds, ends, arrived) if walked.finished else None
        if times is None:
            hint = "penstock.verify(program) shows where it blocks"
            raise ScheduleError("the program cannot run to its end", hint=hint)
        return times

    @cached_property
    def _lines(self) -> tuple[list[int], Needs, list[float]]:
        """The lines of a walk: first items of ranks and links, the needs of items, and latencies.

        Items are the passes, then the messages.
        """
        messages, num_passes = self.messages, len(self.computes)
        number, has_before = num_passes + np.arange(len(messages.send)), messages.before_send >= 0
        num_items = num_passes + len(number)
        needs = Needs.of(
            num_items,
            np.concatenate((number[has_before], messages.user)),
            np.concatenate((messages.before_send[has_before], number)),
        )
        starts = (*self._rank_starts[:-1], *(num_passes + self._link_starts), num_items)
        return [int(start) for start in starts], needs, [0.0] * num_passes + messages.latency.tolist()


def _add_reductions(
    program: Program, costs: StageCosts, replicas: Replicas, starts: Floats, ends: Floats
) -> tuple[Floats, Floats]:
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
