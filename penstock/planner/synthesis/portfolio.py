"""portfolio: the rules that greedy runs try first.

A key is the latest moment at which a pass may start if the step is to end at its bound: first what is most urgent. One
variant puts input gradients first, for which others wait; one puts weight gradients last, so that they fill gaps only;
another goes by kind: gradients before forwards before weight gradients, later stages before earlier ones. A release
keeps a pass that takes memory from running long before it is urgent; how long is the difference between the variants.
"""

from collections.abc import Sequence
from itertools import product
from math import inf

import numpy as np

from penstock.planner.synthesis.greedy import Rule
from penstock.planner.synthesis.rows import Floats, Rows

_EARLY = (-inf, -1.0, 0.0, -2.0, -0.5, -3.0)
"""releases before the urgent moment, in units of a microbatch's work on the busiest rank"""
_LATE = (0.1, 0.05, 0.2)
"""releases as if the step were to end so much later than its bound, in parts of the bound"""
PATIENCE = (0.0, 0.27, 0.2, 0.1, 0.34, 0.05, 0.5)
"""seconds to wait for something better, in parts of a pass"""


def portfolio(rows: Rows, tails: Floats, bound: float, size: int) -> Rule:
    """At most so many rules; `tails` are the seconds that must follow the end of each pass."""
    urgent = bound - tails - rows.seconds[:, None]
    pace = busiest(rows)
    shifts = [shift * pace for shift in _EARLY] + [late * bound - early * pace for late in _LATE for early in (1, 0)]
    rules = list(product(shifts, PATIENCE, _keys(rows, urgent)))[:size]
    takes = (rows.taken > 0)[:, None]
    return Rule(
        np.array([key for _, _, key in rules]),
        np.array([np.where(takes, np.maximum(urgent + shift, 0.0), 0.0) for shift, _, _ in rules]),
        np.array([patience * rows.seconds.mean() for _, patience, _ in rules]),
    )


def busiest(rows: Rows) -> float:
    """Seconds of one microbatch on the rank that has the most to do with it."""
    return max(float(rows.seconds[list(mine)].sum()) for mine in rows.of_rank)


def _keys(rows: Rows, urgent: Floats) -> Sequence[Floats]:
    far = 1e3 * max(float(np.abs(urgent).max()), 1.0)
    part = np.arange(rows.num_rows)[:, None] % 3
    chained = urgent + np.where(part == 1, -far, 0.0)
    if rows.is_mirrored:
        return urgent, chained
    stage = np.arange(rows.num_rows)[:, None] // 3
    by_kind = far * np.choose(part, (1.0, 0.0, 2.0)) - np.where(part == 0, stage * far / rows.num_rows, 0.0)
    return urgent, chained, urgent + np.where(part == 2, far, 0.0), by_kind + np.arange(urgent.shape[1])
