"""Improves one order: passes move along their rank, and the parts of backwards are joined where that is shorter."""

from math import exp
from random import Random
from time import process_time

from penstock.planner.synthesis.evaluate import critical_chain, evaluate
from penstock.planner.synthesis.problem import B, F, I, RankOrder, RankOrders, ScheduleProblem, W

MOVE_EFFORT = 0.15
"""the effort of a move, as a share of that of a greedy run"""
_JOIN_EFFORT = 0.1
"""the effort of joining two passes, as a share of that of a greedy run"""
_HOT, _COLD = 1e-2, 5e-4
"""the first and the last temperature, as shares of the length"""
_REACH = 8
"""the farthest move, in places"""
_PASSES_PER_SECOND = 150_000
"""passes that greedy runs place in a second of CPU"""
_SLACK = 3.0
"""multiple of the requested seconds after which the clock ends a search"""


class Goal:
    """A bound to reach, and an effort of some CPU seconds to reach it.

    Effort is counted in passes placed, so that equal problems get equal answers on any machine. The clock is only a
    cap: it ends a search on a machine so slow that the count alone would take far too long.
    """

    def __init__(self, bound: float, seconds: float) -> None:
        self.bound, self.seconds = bound, seconds
        self.effort = self.left = seconds * _PASSES_PER_SECOND
        self.deadline = process_time() + _SLACK * seconds

    def part(self, share: float) -> "Goal":
        """Returns the same bound with a share of the effort."""
        return Goal(self.bound, share * self.seconds)

    def is_met(self, length: float) -> bool:
        """Returns whether a length is as good as any."""
        return length <= self.bound * (1 + 1e-8)

    def is_over(self, length: float) -> bool:
        """Returns whether to stop, because the goal is met or the effort spent."""
        return self.is_met(length) or self.left <= 0 or process_time() > self.deadline

    def spend(self, passes: float) -> None:
        """Counts passes as placed."""
        self.left -= passes

    def num_runs(self, part: float, passes: float, limits: tuple[int, int]) -> int:
        """Returns how many runs of that many passes a part of the whole effort allows, within limits."""
        least, most = limits
        return int(min(max(part * self.effort / passes, least), most))


def polish(problem: ScheduleProblem, orders: RankOrders, moves: int, goal: Goal) -> RankOrders:
    """Returns the best orders after that many moves (simulated annealing), or when the goal is over.

    A pass of the critical chain moves a few places up or down its rank. Passes that the move makes illegal or too large
    for the memory are deferred to where they may run. A longer result is kept with a probability that falls with the
    temperature, which decreases to almost 0.
    """
    random = Random(0)
    ends, length = evaluate(problem, orders)
    result, best, chain = orders, length, critical_chain(problem, orders, ends)
    for move in range(moves):
        if goal.is_over(best):
            break
        goal.spend(MOVE_EFFORT * sum(map(len, orders)))
        rank, place = random.choice(chain)
        order = orders[rank]
        distance = 1 + int(random.random() ** 2 * _REACH)
        target = place + (distance if random.random() < 0.5 else -distance)
        rest = [*order[:place], *order[place + 1 :]]
        target = min(max(target, 0), len(rest))
        changed = make_legal(problem, rank, [*rest[:target], order[place], *rest[target:]])
        if changed is None or changed == order:
            continue
        trial = [*orders[:rank], changed, *orders[rank + 1 :]]
        ends, found = evaluate(problem, trial)
        temperature = length * _HOT * (_COLD / _HOT) ** (move / moves)
        longer = found - length
        if longer > 0 and not (temperature > 0 and random.random() < exp(-longer / temperature)):
            continue
        orders, length, chain = trial, found, critical_chain(problem, trial, ends)
        if length < best * (1 - 1e-12):
            result, best = orders, length
    return result


def make_legal(problem: ScheduleProblem, rank: int, order: RankOrder) -> RankOrder | None:
    """Returns the order with every pass deferred until its own stage and the memory allow it; None if some never do."""
    room, allocated = problem.room[rank], problem.allocated
    done = dict.fromkeys((stage << 2 | kind for stage in problem.placement.stages[rank] for kind in (F, B, I, W)), 0)
    held, result, waiting = 0.0, [], list[int]()
    for pass_id in order:
        waiting.append(pass_id)
        first = waiting[0]
        at = 0 if len(waiting) == 1 or _may_run(first, done, held + allocated[first], room) else len(waiting) - 1
        # Only passes that run can make room for those that wait.
        while at < len(waiting):
            pass_id = waiting[at]
            if _may_run(pass_id, done, held + allocated[pass_id], room):
                del waiting[at]
                done[pass_id] += 1
                held += allocated[pass_id]
                result.append(pass_id)
                at = 0
            else:
                at += 1
    return result if not waiting else None


def _may_run(pass_id: int, done: dict[int, int], held: float, room: float) -> bool:
    kind, others = pass_id & 3, pass_id & ~3  # `others | kind`: the pass ids of the same stage
    if kind == F:
        return held <= room
    if kind == W:
        return done[pass_id] < done[others | I]
    return done[others | B] + done[others | I] < done[others | F] and held <= room


def join_backwards(problem: ScheduleProblem, orders: RankOrders, goal: Goal) -> RankOrders:
    """Returns the orders with input and weight gradients run as one full backward wherever that costs no time.

    A full backward may take less than its two parts in a row, and frees its memory sooner. A weight gradient that fills
    no gap is better run at once; so every pair is tried, the last first. Adjacent parts are joined first, many at once.
    """
    seconds = problem.seconds
    shorter = [
        stage
        for stage in range(problem.placement.num_stages)
        if seconds[stage << 2 | I] + seconds[stage << 2 | W] - seconds[stage << 2 | B] > 0
    ]
    if not shorter:
        return orders
    orders, length = _join_adjacent(problem, orders, shorter, goal)
    for stage in shorter:
        rank = problem.placement.ranks[stage]
        for nth in reversed(range(orders[rank].count(stage << 2 | I))):
            if goal.is_over(length):
                break
            goal.spend(_JOIN_EFFORT * sum(map(len, orders)))
            # The nth input gradient that is still alone, joined with its weight gradient.
            order = orders[rank]
            first, second = ([at for at, each in enumerate(order) if each == stage << 2 | kind][nth] for kind in (I, W))
            joined = [*order[:first], stage << 2 | B, *order[first + 1 : second], *order[second + 1 :]]
            trial = [*orders[:rank], joined, *orders[rank + 1 :]]
            trial_length = evaluate(problem, trial).length
            if trial_length <= length:
                orders, length = trial, trial_length
    return orders


def _join_adjacent(
    problem: ScheduleProblem, orders: RankOrders, stages: list[int], goal: Goal
) -> tuple[RankOrders, float]:
    """All stages together, or one by one where others would wait for a gradient that a full backward sends later."""
    length = evaluate(problem, orders).length
    together = [_with_full_backwards(order, set(stages)) for order in orders]
    at_once = evaluate(problem, together).length
    for stage in stages:
        if goal.is_over(min(length, at_once)):
            break
        goal.spend(_JOIN_EFFORT * sum(map(len, orders)))
        trial = [_with_full_backwards(order, {stage}) for order in orders]
        trial_length = evaluate(problem, trial).length
        if trial_length <= length:
            orders, length = trial, trial_length
    return (together, at_once) if at_once <= length else (orders, length)


def _with_full_backwards(order: RankOrder, stages: set[int]) -> RankOrder:
    """With a full backward wherever nothing is between its parts and no earlier weight gradient is outstanding."""
    result, outstanding = list[int](), dict[int, int]()
    for pass_id in order:
        stage, kind = pass_id >> 2, pass_id & 3
        outstanding[stage] = outstanding.get(stage, 0) + (kind == I) - (kind == W)
        is_pair = kind == W and result and result[-1] == (stage << 2 | I) and outstanding[stage] == 0
        if is_pair and stage in stages:
            result[-1] = stage << 2 | B
        else:
            result.append(pass_id)
    return result
