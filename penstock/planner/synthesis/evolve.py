"""Search for a short order: greedy runs by many rules, then islands of orders that evolve apart from each other.

When a run is repeated in mirrored time with its own starts as keys, every pass ends as late as the others allow; back
again, every pass starts as early as they allow. Each turn closes gaps that the other could not. Noise on the keys, and
how far forwards are held back, make the difference between children of one parent.

This is an island-model evolutionary search: one large pool would soon hold nothing but variants of one good order. An
island begins with a few different orders and runs for some generations; then simulated annealing (`polish`) improves
its best order. Every third island begins with the best orders found so far.
"""

from dataclasses import dataclass, replace
from math import inf

import numpy as np

from penstock.ir import Floats, Ints
from penstock.planner.synthesis.bounds import earliest_starts
from penstock.planner.synthesis.evaluate import durations, evaluate
from penstock.planner.synthesis.greedy import PATIENCE, Greedy, GreedyRuns, Rules, portfolio, steady_rule
from penstock.planner.synthesis.local_search import MOVE_EFFORT, Goal, polish
from penstock.planner.synthesis.pass_table import ROWS_OF_KIND, PassTable
from penstock.planner.synthesis.problem import B, F, I, RankOrder, RankOrders, W, peak_bytes

_RULES = (12, 240)
"""the fewest and the most rules that are tried in each direction"""
_BASE = 200
"""orders of greedy runs that are kept; each island begins with a few of them"""
_FOUNDERS, _KEPT, _GENERATIONS = 8, 24, 10
"""orders that one island begins with, orders that survive a generation, and generations of an island"""
_CHILDREN = (12, 60)
"""the fewest and the most children of a generation"""
_MOVES = (100, 1500)
"""the fewest and the most moves that polish the best order of an island"""
_HELD_BACK = (0.0, 0.25, 0.5, 1.0, inf)
"""how long before its start in the parent an allocating pass may start, in units of a microbatch's work"""
_UNCHANGED = 4
"""children without noise in every generation"""


def search_orders(table: PassTable, goal: Goal, seeds: list[RankOrders]) -> RankOrders | None:
    """Returns the best orders found from seeds and rules; None if nothing fits in memory."""
    problem = table.problem
    fitting = [
        orders
        for orders in seeds
        if all(peak_bytes(problem, order) <= room for order, room in zip(orders, problem.room, strict=True))
    ]
    if problem.objective == "span":
        # The span counts from the first start of each rank: a rank that starts early must also end early.
        first = np.array([earliest_starts(table)[list(rows), 0].min() for rows in table.rows_of_rank])
        table = replace(table, after=first.max() - first)
    pool = _explore(table, goal, fitting)
    return _refine(pool, goal).orders() if len(pool) else None


def steady_orders(table: PassTable) -> RankOrders | None:
    """Returns the orders of `steady_rule` alone; None if they do not fit in memory."""
    pool = Pool.of_runs(table, Greedy(table).run(steady_rule(table, earliest_starts(table))))
    return pool.orders() if len(pool) else None


def _explore(table: PassTable, goal: Goal, seeds: list[RankOrders]) -> "Pool":
    """The orders of greedy runs by every rule, in both directions, together with the seeds."""
    mirrored = table.mirrored()
    begin, end = earliest_starts(table), earliest_starts(mirrored)
    size = goal.num_runs(0.15, table.num_passes, _RULES)
    pool = Pool.of_orders(table, seeds)
    for way, starts, remaining in ((table, begin, end), (mirrored, end, begin)):
        last_end = goal.bound - table.problem.step_seconds + float(table.after.max())
        rules = portfolio(way, starts, remaining[:, ::-1], last_end, size)
        pool = pool.joined(Pool.of_runs(way, Greedy(way).run(rules)), _BASE)
        goal.spend(len(rules.keys) * table.num_passes)
        if len(pool) and goal.is_met(pool.best):
            break
    return pool


def _refine(base: "Pool", goal: Goal) -> "Pool":
    """The best orders that islands reach before the effort is spent."""
    problem, passes = base.table.problem, base.table.num_passes
    num_children = goal.num_runs(0.1 / _GENERATIONS, passes, _CHILDREN)
    moves = goal.num_runs(0.05, passes * MOVE_EFFORT, _MOVES)
    elite, island = base, 0
    while not goal.is_over(elite.best):
        founders = elite if island % 3 == 2 else base.sample(_FOUNDERS, island)
        # Seeds are counted, not drawn: the same problem always gets the same order.
        pool = _evolve(founders, num_children, island, goal)
        orders = polish(problem, pool.orders(), moves, goal)
        elite = elite.joined(pool, _KEPT).joined(Pool.of_orders(base.table, [orders]), _KEPT)
        island += 1
    return elite


@dataclass(frozen=True)
class Pool:
    """Different orders, best first, as tables of starts in forward time."""

    table: PassTable
    lengths: Floats
    """in the objective"""
    starts: Floats
    positions: Ints
    """of every pass in the order of its rank"""

    @classmethod
    def of_runs(cls, table: PassTable, runs: GreedyRuns) -> "Pool":
        """Returns the runs that reached their end, evaluated exactly; mirrored ones are turned round."""
        ended = np.isfinite(runs.lengths)
        lengths, starts, positions = runs.lengths[ended], runs.starts[ended], runs.positions[ended]
        if table.is_mirrored:
            starts = table.mirror_starts(starts, lengths)
            last = np.array([len(table.rows_of_rank[rank]) for rank in table.rank]) * table.problem.num_microbatches - 1
            positions = last[:, None] - positions[:, :, ::-1]
            table = table.mirrored()
        exact = [evaluate(table.problem, _rank_orders(table, each)).length for each in positions]
        return cls(table, np.asarray(exact, dtype=np.float64), starts, positions)

    @classmethod
    def of_orders(cls, table: PassTable, found: list[RankOrders]) -> "Pool":
        """Returns given orders; a full backward counts as its two parts in a row, unless its stage is not split."""
        shape = (len(found), table.num_rows, table.problem.num_microbatches)
        lengths, starts, positions = np.zeros(len(found)), np.zeros(shape), np.zeros(shape, dtype=np.int64)
        for nth, orders in enumerate(found):
            for order, ends in zip(orders, evaluate(table.problem, orders).ends, strict=True):
                _enter(table, order, ends, starts[nth], positions[nth])
            lengths[nth] = evaluate(table.problem, _rank_orders(table, positions[nth])).length
        return cls(table, lengths, starts, positions)

    def joined(self, other: "Pool", size: int) -> "Pool":
        """Returns the best of both, at most `size`; of equal orders one is kept."""
        lengths = np.concatenate((self.lengths, other.lengths))
        positions = np.concatenate((self.positions, other.positions))
        starts = np.concatenate((self.starts, other.starts))
        laid_flat = positions.reshape(len(positions), positions[0].size if len(positions) else 0)
        _, first = np.unique(laid_flat, axis=0, return_index=True)
        kept = first[np.argsort(lengths[first], kind="stable")][:size]
        return Pool(self.table, lengths[kept], starts[kept], positions[kept])

    def sample(self, size: int, seed: int) -> "Pool":
        """Returns `size` of the orders, or all, the same for the same seed."""
        count = min(size, len(self))
        kept = np.sort(np.random.default_rng(seed).choice(len(self), count, replace=False))
        return Pool(self.table, self.lengths[kept], self.starts[kept], self.positions[kept])

    @property
    def best(self) -> float:
        """The length of the best."""
        return float(self.lengths[0])

    def orders(self) -> RankOrders:
        """Returns the best orders as pass ids."""
        return _rank_orders(self.table, self.positions[0])

    def __len__(self) -> int:
        return len(self.lengths)


def _enter(table: PassTable, order: RankOrder, ends: list[float], starts: Floats, positions: Ints) -> None:
    """Writes the passes of one rank into the tables of starts and positions."""
    done: dict[int, int] = {}
    position, width = 0, table.by_microbatch.shape[1]
    for pass_id, end, seconds in zip(order, ends, durations(table.problem, order), strict=True):
        start = end - seconds
        for row in (3 * (pass_id >> 2) + part for part in ROWS_OF_KIND[pass_id & 3]):
            column = done.get(row, 0)
            starts[row, column], positions[row, column] = start, position
            start, position, done[row] = start + table.by_microbatch[row, column % width], position + 1, column + 1
    for stage in table.unsplit & {pass_id >> 2 for pass_id in order}:
        # A backward that is not split has its second part at the end of the first.
        starts[3 * stage + 2] = starts[3 * stage + 1] + table.by_microbatch[3 * stage + 1]


def _rank_orders(table: PassTable, positions: Ints) -> RankOrders:
    """The pass ids of every rank by position."""
    found = []
    for rows, stages in zip(table.rows_of_rank, table.problem.placement.stages, strict=True):
        # A backward that is not split is in the row of its first part alone.
        kinds = ((stage, (F, B, None) if stage in table.unsplit else (F, I, W)) for stage in stages)
        pass_ids = np.array([-1 if kind is None else stage << 2 | kind for stage, three in kinds for kind in three])
        sequence = np.argsort(positions[list(rows)], axis=None, kind="stable")
        order = np.repeat(pass_ids, positions.shape[1])[sequence]
        found.append(order[order >= 0].tolist())
    return found


def _evolve(pool: Pool, num_children: int, seed: int, goal: Goal) -> Pool:
    """The pool after all generations, mirrored and forwards in turn, or when the goal is met or the effort spent."""
    directions = (Greedy(pool.table.mirrored()), Greedy(pool.table))
    random = np.random.default_rng(seed)
    for generation in range(_GENERATIONS):
        if goal.is_over(pool.best):
            break
        goal.spend(num_children * pool.table.num_passes)
        greedy = directions[generation % 2]
        runs = greedy.run(_child_rules(greedy.table, pool, num_children, random))
        pool = pool.joined(Pool.of_runs(greedy.table, runs), _KEPT)
    return pool


def _child_rules(table: PassTable, pool: Pool, count: int, random: np.random.Generator) -> Rules:
    """Rules of a generation: the starts of good orders as priorities, with noise; better parents more often."""
    parents = (random.random(count) ** 1.5 * len(pool)).astype(np.int64)
    keys = pool.starts[parents]
    own, pace = pool.table, pool.table.busiest_seconds
    if table.is_mirrored:
        ends = (keys + own.by_microbatch + own.after[own.rank][:, None]).max(axis=(1, 2))
        keys = own.mirror_starts(keys, ends)
    back = pace * random.choice(_HELD_BACK, (count, 1, 1))
    releases = np.where((table.allocated > 0)[:, None], np.maximum(keys - back, 0.0), 0.0)
    patience = random.choice((*PATIENCE, 1.0), count) * table.seconds.mean()
    # Noise on whole rows, on single passes, or on both.
    which, rows = random.random((count, 1, 1)), (count, keys.shape[1], 1)
    by_row = random.normal(size=rows) * (random.random(rows) < 0.3) * (which < 0.5)
    by_pass = random.normal(size=keys.shape) * (random.random(keys.shape) < 0.2) * (which > 0.3)
    noise = (by_row + by_pass) * (pace * 10 ** random.uniform(-1.5, 0.0, (count, 1, 1)))
    noise[:_UNCHANGED] = 0.0
    return Rules(keys + noise, releases, patience)
