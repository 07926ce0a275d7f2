"""When the passes of rank orders run, and which of them the length of a step depends on.

This is a second implementation of the rules of penstock.simulate, for speed: a search evaluates thousands of orders,
and lowering and simulating one takes about 10 times as long with 8 ranks and 32 microbatches, and 50 times with 4 and
8. It is tested against the simulator, and every order that a search returns is simulated.

A message leaves when the pass that made it ends and its link is free; as the links that leave a rank are used in the
order of its passes, only passes need to be walked. If one pass sends several messages over one link, they go in the
order of the receiving stages, where the simulator goes by which is used first.
"""

from collections import deque
from math import inf
from typing import NamedTuple

from penstock.planner.synthesis.problem import F, I, RankOrder, RankOrders, ScheduleProblem, W

_ROUNDING = 1e-9

Place = tuple[int, int]
"""a rank and the position of a pass in its order"""


class Evaluation(NamedTuple):
    """When the passes of every rank end, and the length of a step in the objective of the problem."""

    ends: list[list[float]]
    """counted from the first pass that can start; empty for orders that cannot run to their end"""
    length: float


DEADLOCK = Evaluation([], inf)


def evaluate(problem: ScheduleProblem, orders: RankOrders) -> Evaluation:
    """Runs every pass as soon as its rank and its inputs allow."""
    num_stages, count = problem.placement.num_stages, problem.num_microbatches
    # By stage and microbatch, inputs first and then returning gradients: messages that are missing, when the rest came.
    sources = (*problem.cuts.producers, *problem.cuts.gradient_consumers)
    missing = [len(stages) for stages in sources for _ in range(count)]
    ready = [0.0] * len(missing)
    done = [0] * (2 * num_stages)
    free = [0.0] * problem.num_links
    ends: list[list[float]] = [[] for _ in orders]
    waiting: dict[int, int] = {}
    runnable, unfinished = deque(range(len(orders))), len(orders)
    seconds, sides = problem.seconds, (problem.outputs, problem.gradients)
    unequal = problem.unequal_seconds
    # By stage, the microbatches whose weight gradient is still to run; only used if microbatches differ.
    outstanding: list[deque[int]] = [deque() for _ in range(num_stages)]
    while runnable:
        rank = runnable.popleft()
        rank_ends, order = ends[rank], orders[rank]
        now = rank_ends[-1] if rank_ends else 0.0
        for place in range(len(rank_ends), len(order)):
            pass_id = order[place]
            kind, stage = pass_id & 3, pass_id >> 2
            if kind == W:
                now += seconds[pass_id] if unequal is None else unequal[pass_id][outstanding[stage].popleft()]
                rank_ends.append(now)
                continue
            side = kind != F
            microbatch = done[stage + side * num_stages]
            slot = (stage + side * num_stages) * count + microbatch
            if missing[slot]:
                # The rank continues when the last missing message has been sent.
                waiting[slot] = rank
                break
            if ready[slot] > now:
                now = ready[slot]
            if unequal is None:
                now += seconds[pass_id]
            else:
                now += unequal[pass_id][microbatch]
                if kind == I:
                    outstanding[stage].append(microbatch)
            rank_ends.append(now)
            done[stage + side * num_stages] += 1
            for target, link, occupied, latency in sides[side][stage]:
                arrival = now
                if link >= 0:
                    if free[link] > now:
                        arrival = free[link]
                    arrival += occupied
                    free[link] = arrival
                    arrival += latency
                slot = (target + side * num_stages) * count + microbatch
                missing[slot] -= 1
                if arrival > ready[slot]:
                    ready[slot] = arrival
                if not missing[slot] and slot in waiting:
                    runnable.append(waiting.pop(slot))
        else:
            unfinished -= 1
    if unfinished:
        return DEADLOCK
    if problem.objective == "span":
        return Evaluation(ends, max(_span(problem, orders, ends, rank) for rank in range(len(orders))))
    return Evaluation(ends, problem.step_seconds + max(rank_ends[-1] for rank_ends in ends))


def _span(problem: ScheduleProblem, orders: RankOrders, ends: list[list[float]], rank: int) -> float:
    """Seconds from the first start to the last end of a rank."""
    return ends[rank][-1] - ends[rank][0] + durations(problem, orders[rank][:1])[0]


def durations(problem: ScheduleProblem, order: RankOrder) -> list[float]:
    """Returns the seconds of every pass of an order."""
    unequal = problem.unequal_seconds
    if unequal is None:
        return [problem.seconds[pass_id] for pass_id in order]
    # Microbatches are counted by stage and direction; weight gradients follow their input gradients.
    done, outstanding = dict[tuple[int, bool], int](), dict[int, deque[int]]()
    found = []
    for pass_id in order:
        stage, kind = pass_id >> 2, pass_id & 3
        if kind == W:
            microbatch = outstanding[stage].popleft()
        else:
            microbatch = done.get((stage, kind == F), 0)
            done[stage, kind == F] = microbatch + 1
            if kind == I:
                outstanding.setdefault(stage, deque()).append(microbatch)
        found.append(unequal[pass_id][microbatch])
    return found


def critical_chain(problem: ScheduleProblem, orders: RankOrders, ends: list[list[float]]) -> list[Place]:
    """Returns a chain of passes, each of which waited for the next, last pass first.

    If a pass waited for two others, the chain follows that of its own rank.
    """
    places: dict[tuple[int, bool], list[Place]] = {}
    for rank, order in enumerate(orders):
        for place, pass_id in enumerate(order):
            if pass_id & 3 != W:
                # By stage and direction, the passes of microbatches 0, 1, 2 ...
                places.setdefault((pass_id >> 2, pass_id & 3 == F), []).append((rank, place))
    if problem.objective == "makespan":
        rank = max(range(len(orders)), key=lambda each: ends[each][-1])
    else:
        rank = max(range(len(orders)), key=lambda each: _span(problem, orders, ends, each))
    place = len(orders[rank]) - 1
    chain = [(rank, place)]
    seconds = [durations(problem, order) for order in orders]
    grace = _ROUNDING * max(rank_ends[-1] for rank_ends in ends)
    while True:
        pass_id = orders[rank][place]
        start = ends[rank][place] - seconds[rank][place]
        if place and ends[rank][place - 1] >= start - grace:
            place -= 1
        elif pass_id & 3 == W or start <= 0.0:
            return chain
        else:
            stage, is_forward = pass_id >> 2, pass_id & 3 == F
            microbatch = places[stage, is_forward].index((rank, place))
            sources = (problem.cuts.producers if is_forward else problem.cuts.gradient_consumers)[stage]
            if not sources:
                return chain
            found = [places[source, is_forward][microbatch] for source in sources]
            rank, place = max(found, key=lambda at: ends[at[0]][at[1]])
        chain.append((rank, place))
