"""improve: makes new orders of good ones by running them again, forwards and mirrored, with small changes.

When a run is repeated in mirrored time with its own starts as keys, every pass ends as late as the others allow; back
again, every pass starts as early as they allow. Each turn closes gaps that the other could not see. Noise on the keys
of some rows or passes, and how far forwards are held back, make the difference between children of one parent.
Orders that do not get shorter are forgotten.
"""

from math import inf

import numpy as np

from penstock.planner.synthesis.goal import Goal
from penstock.planner.synthesis.greedy import Greedy, Rule
from penstock.planner.synthesis.pool import Pool
from penstock.planner.synthesis.portfolio import PATIENCE, busiest
from penstock.planner.synthesis.rows import Floats, Rows

_HELD_BACK = (0.0, 0.25, 0.5, 1.0, inf)
"""how long before its moment in the parent a taker may start, in units of a microbatch's work"""
_FAITHFUL = 4
"""children without noise in every generation"""


class Improvement:
    """Generations of one pool, by turns mirrored and forwards."""

    def __init__(self, rows: Rows, children: int, kept: int, seed: int) -> None:
        self.directions = (Greedy(rows.mirrored()), Greedy(rows))
        self.children, self.kept = children, kept
        self.pace = busiest(rows)
        # Seeds are counted, not drawn: the same problem always gets the same order.
        self.random = np.random.default_rng(seed)

    def run(self, pool: Pool, generations: int, goal: Goal) -> Pool:
        """The pool after so many generations, or when the goal is met or the effort spent."""
        for generation in range(generations):
            if goal.is_over(pool.best):
                break
            goal.spend(self.children * pool.rows.num_passes)
            greedy = self.directions[generation % 2]
            runs = greedy.run(self._rule(greedy.rows, pool))
            pool = pool.joined(Pool.of(greedy.rows, runs), self.kept)
        return pool

    def _rule(self, rows: Rows, pool: Pool) -> Rule:
        random, count = self.random, self.children
        parents = (random.random(count) ** 1.5 * len(pool)).astype(np.int64)
        keys = pool.starts[parents]
        if rows.is_mirrored:
            ends = (keys + pool.rows.seconds[:, None] + pool.rows.after[pool.rows.rank][:, None]).max(axis=(1, 2))
            keys = pool.rows.turned(keys, ends)
        back = self.pace * random.choice(_HELD_BACK, (count, 1, 1))
        releases = np.where((rows.taken > 0)[:, None], np.maximum(keys - back, 0.0), 0.0)
        patience = random.choice((*PATIENCE, 1.0), count) * rows.seconds.mean()
        return Rule(keys + self._noise(keys.shape), releases, patience)

    def _noise(self, shape: tuple[int, ...]) -> Floats:
        random, (count, rows, _) = self.random, shape
        which = random.random((count, 1, 1))
        by_row = random.normal(size=(count, rows, 1)) * (random.random((count, rows, 1)) < 0.3) * (which < 0.5)
        by_pass = random.normal(size=shape) * (random.random(shape) < 0.2) * (which > 0.3)
        strength = self.pace * 10 ** random.uniform(-1.5, 0.0, (count, 1, 1))
        noise = (by_row + by_pass) * strength
        noise[:_FAITHFUL] = 0.0
        return np.asarray(noise)
