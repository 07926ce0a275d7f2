"""search: greedy runs by every rule, then islands of orders that improve apart from each other.

One large pool would soon hold nothing but variants of one good order. An island begins with a few orders of different
kinds, runs for some generations, and has its best polished; every third begins with the best found so far.
"""

import numpy as np

from penstock.planner.synthesis.goal import Goal
from penstock.planner.synthesis.greedy import Greedy
from penstock.planner.synthesis.heads import heads
from penstock.planner.synthesis.improve import Improvement
from penstock.planner.synthesis.polish import MOVE, polish
from penstock.planner.synthesis.pool import Pool
from penstock.planner.synthesis.portfolio import portfolio
from penstock.planner.synthesis.rows import Rows
from penstock.planner.synthesis.shop import Words
from penstock.planner.synthesis.words import peak

_RULES = (12, 240)
"""the fewest and the most rules that are tried in each direction"""
_BASE = 200
"""orders that islands are founded from"""
_FOUNDERS, _KEPT, _GENERATIONS = 8, 24, 10
_CHILDREN = (12, 60)
"""the fewest and the most children of a generation"""
_MOVES = (100, 1500)
"""the fewest and the most moves that polish the best of an island"""


def search(rows: Rows, goal: Goal, seeds: list[Words]) -> Words | None:
    """The best words that are found from seeds and rules; None if nothing fits in memory."""
    fitting = [words for words in seeds if _fits(rows, words)]
    pool = explore(_aligned(rows), goal, fitting)
    return refine(pool, goal).words() if len(pool) else None


def _fits(rows: Rows, words: Words) -> bool:
    return all(peak(rows.shop, word) <= room for word, room in zip(words, rows.shop.room, strict=True))


def _aligned(rows: Rows) -> Rows:
    """If spans are to be short, a rank that begins early may end late no more than the others."""
    if rows.shop.problem.objective == "makespan":
        return rows
    begin = heads(rows)
    first = np.array([begin[list(mine), 0].min() for mine in rows.of_rank])
    return rows.ending(first.max() - first)


def explore(rows: Rows, goal: Goal, seeds: list[Words]) -> Pool:
    """What greedy runs find by every rule, in both directions, together with the seeds."""
    mirrored = rows.mirrored()
    begin, end = heads(rows), heads(mirrored)
    size = goal.runs(0.15, rows.num_passes, _RULES)
    pool = Pool.of_words(rows, seeds)
    for way, tails in ((rows, end), (mirrored, begin)):
        rule = portfolio(way, tails[:, ::-1], goal.bound + float(rows.after.max()), size)
        pool = pool.joined(Pool.of(way, Greedy(way).run(rule)), _BASE)
        goal.spend(len(rule.keys) * rows.num_passes)
        if len(pool) and goal.is_met(pool.best):
            break
    return pool


def refine(base: Pool, goal: Goal) -> Pool:
    """The best orders that islands come to before the effort is spent."""
    shop, passes = base.rows.shop, base.rows.num_passes
    children = goal.runs(0.1 / _GENERATIONS, passes, _CHILDREN)
    moves = goal.runs(0.05, passes * MOVE, _MOVES)
    elite, island = base, 0
    while not goal.is_over(elite.best):
        founders = elite if island % 3 == 2 else base.sample(_FOUNDERS, island)
        pool = Improvement(base.rows, children, _KEPT, island).run(founders, _GENERATIONS, goal)
        words = polish(shop, pool.words(), moves, goal)
        elite = elite.joined(pool, _KEPT).joined(Pool.of_words(base.rows, [words]), _KEPT)
        island += 1
    return elite
