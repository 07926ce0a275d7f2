"""simulate: predicts when every action and every message of a Program happens.

Ranks and links are lines that do one thing at a time: a rank its passes in order, a link (one direction between two
ranks) its messages in the order of their Sends. A message leaves when its rank gets to the Send and the link is free,
occupies the link for bytes / bandwidth and has arrived one latency later; receives are posted ahead, so it does not
wait for them. Sends, receives and the like take no time of their rank. Every order being fixed, one walk settles all
times, unless the ranks are more than the cores that they share: shared_cores.py. Replicas average the gradients of a
stage from its Reduce on, while the passes go on.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import CostError, ScheduleError
from penstock.ir import (
    COMPUTE_KINDS,
    Cluster,
    Codes,
    Fact,
    Kind,
    Makers,
    Needs,
    Program,
    Series,
    StageCosts,
    Trace,
    find_dependencies,
    microbatch_of,
    pack,
    pass_seconds,
    peer_of,
    stage_of,
    walk,
)
from penstock.simulate.memory import curves
from penstock.simulate.reductions import reduced
from penstock.simulate.shared_cores import Happened, Mail, run_on

Indices = NDArray[np.int64]
Seconds = NDArray[np.float64]


def simulate(program: Program, costs: StageCosts | None = None, cluster: Cluster | None = None) -> Trace:
    """The predicted Trace. Without costs every pass takes one second; without a cluster messages take no time.

    Costs are those on the ranks that hold the stages: the slowness of a rank is in them.
    """
    costs = costs or StageCosts.uniform(program.num_stages)
    cluster = cluster or Cluster(program.num_ranks)
    _check_fit(program, costs, cluster)
    _check_messages(program)
    wires = _wires(program, costs, cluster)
    computes = np.flatnonzero(np.isin(program.table.kinds, COMPUTE_KINDS))
    durations = pass_seconds(program.table, costs, cluster.overlap)[computes]
    happened = _happened(program, computes, durations, wires, cluster.cores)
    action_ends = _spread(program, computes, happened.ends)
    # A difference may fall short, by rounding, of the moment that was waited for.
    starts = action_ends.copy()
    starts[computes] = np.maximum(happened.starts, _above(program, action_ends)[computes])
    arrived = happened.arrived
    sent = np.maximum(arrived - wires.seconds - wires.latency, action_ends[wires.send])
    by_send = np.argsort(wires.send)
    held = curves(program, costs, starts, action_ends)
    starts, action_ends = reduced(program, costs, cluster.replicas, starts, action_ends)
    return Trace(
        program,
        Series(starts),
        Series(action_ends),
        Series(sent[by_send]),
        Series(arrived[by_send]),
        held,
    )


def _check_fit(program: Program, costs: StageCosts, cluster: Cluster) -> None:
    if costs.num_stages != program.num_stages:
        raise CostError("costs are for another number of stages", costs=costs.num_stages, program=program.num_stages)
    if cluster.ranks != program.num_ranks:
        raise CostError("the cluster has another number of ranks", cluster=cluster.ranks, program=program.num_ranks)


def _check_messages(program: Program) -> None:
    """Refuse what would look fast because a rank does not wait for what it needs; the proof says more."""
    table = program.table
    links = find_dependencies(
        table.passes, Makers(table.passes, program.num_stages, program.num_microbatches), program.cuts
    )
    own = table.rank_of[links.waiter] == table.rank_of[links.needed]
    sends = table.codes[table.kinds == Kind.SEND]
    crossing = links.where(~own)
    wanted = pack(Kind.SEND, crossing.source, crossing.microbatch, crossing.target)
    is_late = own & (links.needed >= links.waiter)
    if (links.needed < 0).any() or is_late.any() or not np.array_equal(np.sort(sends), np.sort(wanted)):
        raise ScheduleError(
            "the program does not make and send all that its actions need",
            sends=len(sends),
            needed=len(wanted),
            hint="penstock.verify(program) says what is missing",
        )


class Wires(NamedTuple):
    """The messages of a program, link by link in the order of their Sends."""

    send: Indices
    """index of the Send"""
    user: Indices
    """index of the pass that uses the values"""
    line_starts: Indices
    """where each link's messages begin"""
    seconds: Seconds
    latency: Seconds


def _wires(program: Program, costs: StageCosts, cluster: Cluster) -> Wires:
    table, ranks = program.table, np.asarray(program.placement.ranks)
    send = np.flatnonzero(table.kinds == Kind.SEND)
    source, target = stage_of(table.codes[send]), peer_of(table.codes[send])
    link = ranks[source] * program.num_ranks + ranks[target]
    by_link = np.argsort(link, kind="stable")
    send, source, target, link = send[by_link], source[by_link], target[by_link], link[by_link]
    names, line_starts, which = np.unique(link, return_index=True, return_inverse=True)
    links = [cluster.link(int(name) // program.num_ranks, int(name) % program.num_ranks) for name in names]
    latency = np.array([link.latency for link in links], dtype=np.float64)
    pace = np.array([0.0 if link.bandwidth is None else 1.0 / link.bandwidth for link in links], dtype=np.float64)
    return Wires(
        send,
        _users(program, source, target, microbatch_of(table.codes[send])),
        line_starts,
        costs.message_bytes(source, target) * pace[which],
        latency[which],
    )


def _users(program: Program, source: Codes, target: Codes, microbatch: Codes) -> Indices:
    makers = Makers(program.table.passes, program.num_stages, program.num_microbatches)
    return np.where(
        target > source, makers[Fact.OUTPUT][target, microbatch], makers[Fact.INPUT_GRADIENT][target, microbatch]
    )


class Passes(NamedTuple):
    """The passes of a program, rank by rank in order, and how its messages hang on them."""

    starts: Indices
    """where the passes of each rank begin"""
    seconds: Seconds
    above: Indices
    """per message the pass after which it leaves, the last one above its Send; -1: none is above"""
    user: Indices
    """per message the pass that uses it"""


def _passes(program: Program, computes: Indices, durations: Seconds, wires: Wires) -> Passes:
    table = program.table
    item = np.full(len(table.codes), -1, dtype=np.int64)
    item[computes] = np.arange(len(computes))
    starts = np.searchsorted(computes, table.starts)
    above = np.searchsorted(computes, wires.send) - 1
    above[above < starts[table.rank_of[wires.send]]] = -1
    return Passes(starts, durations, above, item[wires.user])


def _happened(program: Program, computes: Indices, durations: Seconds, wires: Wires, cores: int | None) -> Happened:
    passes = _passes(program, computes, durations, wires)
    is_crowded = cores is not None and cores < program.num_ranks
    found = _shared(passes, wires, cores) if cores is not None and is_crowded else _walked(passes, wires)
    if found is None:
        raise ScheduleError("the program cannot run to its end", hint="penstock.verify(program) says where it blocks")
    return found


def _walked(passes: Passes, wires: Wires) -> Happened | None:
    """Every rank computes at its own pace, so passes are as long as they are."""
    num_passes, num_messages = len(passes.seconds), len(wires.send)
    messages, has_above = num_passes + np.arange(num_messages), passes.above >= 0
    needs = Needs.of(
        num_passes + num_messages,
        np.concatenate((messages[has_above], passes.user)),
        np.concatenate((passes.above[has_above], messages)),
    )
    lines = (*passes.starts[:-1], *(num_passes + wires.line_starts), num_passes + num_messages)
    seconds = np.concatenate((passes.seconds, wires.seconds))
    tails = np.concatenate((np.zeros(num_passes), wires.latency))
    result = walk([int(start) for start in lines], needs, seconds.tolist(), tails.tolist())
    ends = result.ends[:num_passes]
    return Happened(ends - passes.seconds, ends, result.ends[num_passes:]) if result.finished else None


def _shared(passes: Passes, wires: Wires, cores: int) -> Happened | None:
    link = np.searchsorted(wires.line_starts, np.arange(len(wires.send)), side="right")
    columns = (passes.above, passes.user, link, wires.seconds, wires.latency)
    mail = list(map(Mail, *(column.tolist() for column in columns)))
    return run_on(cores, passes.starts.tolist(), passes.seconds.tolist(), mail)


def _spread(program: Program, computes: Indices, ends: Seconds) -> Seconds:
    """Per action when it has happened: passes at their end, all else when the pass above it on its rank has ended."""
    table = program.table
    above = np.searchsorted(computes, np.arange(len(table.codes)), side="right") - 1
    first = np.searchsorted(computes, table.starts[table.rank_of])
    return np.where(above >= first, ends[np.maximum(above, 0)], 0.0)


def _above(program: Program, ends: Seconds) -> Seconds:
    """Per action when the one above it on its rank has happened; 0 for the first."""
    above = np.concatenate(([0.0], ends))
    above[program.table.starts[:-1]] = 0.0
    return above[:-1]
