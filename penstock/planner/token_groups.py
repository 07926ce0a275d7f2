"""Groups samples of unequal lengths into microbatches of at most N padded tokens, and orders these.

The order of microbatches of unequal lengths matters: while the first ones fill the pipeline and the last ones drain it,
ranks are idle in proportion to their lengths. Each batch has other lengths, so the time to plan is limited to a share
of the predicted step. Sums are computed in Python, in a fixed order, because those of numpy may differ between
processors: ranks that plan the same batch, on different machines too, get the same result.
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from penstock.errors import RunError
from penstock.ir import PASS_KINDS, Floats, Kind, Plan, Trace, microbatch_of, stage_of
from penstock.passes import lower
from penstock.planner.resize import resized_schedule
from penstock.simulate import Makespans

_STEPS_PER_OCTAVE = 8
"""how many padded lengths there are between a length and its double"""
_SHORTEST_STEP = 8
"""the smallest difference between two padded lengths"""
_SHARES = (1.0, 0.5, 0.25)
"""shares of the budget that microbatches may have: smaller ones fill the pipeline earlier, but cost more passes"""
_PLANNING_SHARE = 0.003
"""how much of the predicted step may be spent on simulating the orders of one grouping, beyond the first order"""
_SECONDS_PER_ITEM = 1e-6
"""what the simulation of a pass or message takes, at most, on current processors"""
_PASS_SECONDS = 1e-4
"""what a pass takes beside its tokens, until passes have been recorded"""
_DECAY = 0.8
"""weight of the recorded passes of a step relative to those of the next recorded step"""
_MAX_KEPT = 256
"""the most batches whose groups are kept, by their sorted lengths"""


class TokenGroup(NamedTuple):
    """The samples of a microbatch and the length to which they are padded."""

    samples: tuple[int, ...]
    """their indices in the batch"""
    length: int
    """positions of each sample"""

    @property
    def tokens(self) -> int:
        """Padded tokens of the microbatch."""
        return len(self.samples) * self.length


def padded_length(length: int, limit: int) -> int:
    """The length rounded up to a multiple of 8, above 64 to one of eight lengths per doubling, but not above `limit`.

    Every new shape is recorded, so few of them should occur. This adds at most 1/8 to a sample of more than 64 tokens.
    """
    step = max(_SHORTEST_STEP, (1 << max(0, length - 1).bit_length()) // (2 * _STEPS_PER_OCTAVE))
    return min(-(-length // step) * step, limit)


def group_samples(lengths: Sequence[int], budget: int, width: int, share: float = 1.0) -> list[TokenGroup]:
    """Group samples of similar lengths, the longest first, into microbatches of at most `budget * share` padded tokens.

    A sample that is longer than that is a microbatch of its own. Full microbatches of one length have equally many
    samples, so that few shapes occur.

    Raises:
        RunError: if a sample is longer than the budget
    """
    if lengths and max(lengths) > budget:
        sample = max(range(len(lengths)), key=lengths.__getitem__)
        raise RunError(
            "budget_tokens must be at least the length of the longest sample",
            got=budget,
            longest=lengths[sample],
            sample=sample,
            hint=f"budget_tokens={lengths[sample]} or more, or truncate the samples",
        )
    left, groups = sorted(range(len(lengths)), key=lambda sample: (-lengths[sample], sample)), []
    while left:
        length = padded_length(lengths[left[0]], min(width, budget))
        count = max(1, int(budget * share) // length)
        groups.append(TokenGroup(tuple(left[:count]), length))
        left = left[count:]
    return groups


def balance(weights: Sequence[float], count: int) -> list[list[int]]:
    """Divide items among `count` parts of about equal weight, each item to the lightest part, the heaviest first."""
    parts: list[list[int]] = [[] for _ in range(count)]
    totals = [0.0] * count
    for item in sorted(range(len(weights)), key=lambda item: (-weights[item], item)):
        lightest = min(range(count), key=lambda part: (totals[part], len(parts[part])))
        parts[lightest].append(item)
        totals[lightest] += weights[item]
    return [sorted(part) for part in parts]


class TokenCosts:
    """Seconds of the passes of every stage by the shape of a microbatch: a constant, per token, and per pair of tokens.

    At first they are those of the plan, in proportion to tokens. Recorded steps replace them: the three parts are
    fitted to the recorded passes, by least squares of the relative errors, none of them negative.
    """

    def __init__(self, plan: Plan, planned_tokens: float) -> None:
        """`planned_tokens` are those of a microbatch of the plan."""
        stages = plan.num_stages
        self._parts = np.zeros((3, len(Kind), stages))
        for kind in PASS_KINDS:
            self._parts[0, kind] = _PASS_SECONDS
            self._parts[1, kind] = np.asarray(plan.costs.mean_seconds(kind)) / planned_tokens
        if not self._parts[1].any():
            # The plan has no costs: forward and backward in the usual ratio.
            self._parts[1, [Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD]] = 1e-6
            self._parts[1, Kind.BACKWARD] = 2e-6
        self._moments: dict[tuple[int, int], list[list[float]]] = {}
        """by kind and stage the sums of the products of (constant, tokens, pairs, seconds), each divided by seconds"""

    def seconds(self, groups: Sequence[TokenGroup]) -> Floats:
        """Seconds by kind, stage and microbatch."""
        tokens = np.asarray([float(group.tokens) for group in groups])
        pairs = np.asarray([float(group.tokens * group.length) for group in groups])
        constant, per_token, per_pair = self._parts[..., None]
        return np.asarray(constant + per_token * tokens + per_pair * pairs)

    def add(self, trace: Trace, groups: Sequence[TokenGroup]) -> None:
        """Fit the costs to the recorded passes of a step."""
        table = trace.program.table
        columns = table.kinds, stage_of(table.codes), microbatch_of(table.codes), trace.durations
        passes: dict[tuple[int, int], list[tuple[float, float, float, float]]] = {}
        for kind, stage, microbatch, seconds in zip(*(column.tolist() for column in columns), strict=True):
            if kind in PASS_KINDS and seconds > 0:
                group = groups[microbatch]
                row = (1 / seconds, group.tokens / seconds, group.tokens * group.length / seconds, 1.0)
                passes.setdefault((kind, stage), []).append(row)
        for place, rows in passes.items():
            before = self._moments.get(place, [[0.0] * 4] * 4)
            now = [[sum([row[i] * row[j] for row in rows]) for j in range(4)] for i in range(4)]
            moments = [[_DECAY * b + n for b, n in zip(*pair, strict=True)] for pair in zip(before, now, strict=True)]
            self._moments[place] = moments
            for part, value in enumerate(_fit(moments)):
                self._parts[part, place[0], place[1]] = value


def _fit(moments: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """The parts of a cost that fit the recorded passes best, none of them negative."""
    best, least = (0.0, 0.0, 0.0), float("inf")
    for used in (used for count in (1, 2, 3) for used in combinations(range(3), count)):
        found = _solve([[moments[i][j] for j in (*used, 3)] for i in used])
        if found is None or min(found) < 0:
            continue
        # The sum of squared relative errors, with the solution put in.
        error = moments[3][3] - sum(value * moments[part][3] for part, value in zip(used, found, strict=True))
        # Another part must explain more than rounding and noise, or it is left out.
        if error < 0.98 * least:
            values = dict(zip(used, found, strict=True))
            best, least = (values.get(0, 0.0), values.get(1, 0.0), values.get(2, 0.0)), error
    return best


def _solve(rows: list[list[float]]) -> list[float] | None:
    """Solve up to three linear equations, each a row with its right side last; None if they are degenerate."""
    size = len(rows)
    # Scaled to a unit diagonal: tokens and their pairs differ by orders of magnitude.
    scales = [rows[i][i] ** 0.5 for i in range(size)]
    if not all(scales):
        return None
    table = [
        [rows[i][j] / (scales[i] * scales[j]) for j in range(size)] + [rows[i][size] / scales[i]] for i in range(size)
    ]
    for i in range(size):
        if table[i][i] < 1e-9:
            return None
        for j in range(i + 1, size):
            factor = table[j][i] / table[i][i]
            table[j] = [there - factor * here for here, there in zip(table[i], table[j], strict=True)]
    values = [0.0] * size
    for i in reversed(range(size)):
        known = sum(table[i][j] * values[j] for j in range(i + 1, size))
        values[i] = (table[i][size] - known) / table[i][i]
    return [value / scale for value, scale in zip(values, scales, strict=True)]


class TokenPlanner:
    """Chooses groups of samples and their order for batches of one plan, by simulating candidates."""

    def __init__(self, plan: Plan, planned_tokens: float) -> None:
        self._plan, self._planned_tokens = plan, planned_tokens
        self.costs = TokenCosts(plan, planned_tokens)
        self._makespans: dict[int, Makespans] = {}
        """by number of microbatches"""
        self._known: OrderedDict[tuple[object, ...], list[TokenGroup]] = OrderedDict()
        """the groups of sorted lengths"""

    def groups(self, lengths: Sequence[int], budget: int, width: int) -> list[TokenGroup]:
        """The groups of a batch in the order that the simulator predicts to be fastest.

        `width` is the length to which the samples are padded.
        """
        # The best groups depend on the lengths only: batches with the same ones share them.
        samples = sorted(range(len(lengths)), key=lambda sample: (-lengths[sample], sample))
        key = (tuple(lengths[sample] for sample in samples), budget, width)
        groups = self._known.get(key)
        if groups is None:
            groups = self._known[key] = self._search([lengths[sample] for sample in samples], budget, width)
            if len(self._known) > _MAX_KEPT:
                self._known.popitem(last=False)
        return [TokenGroup(tuple(samples[place] for place in group.samples), group.length) for group in groups]

    def add(self, trace: Trace, groups: Sequence[TokenGroup]) -> None:
        """Update the costs by a recorded step."""
        self.costs.add(trace, groups)
        self._known.clear()

    def _search(self, lengths: Sequence[int], budget: int, width: int) -> list[TokenGroup]:
        """The groups with the shortest predicted step, over several sizes of microbatches and orders of them."""
        best: tuple[float, list[TokenGroup]] | None = None
        for share in _SHARES:
            groups = group_samples(lengths, budget, width, share)
            if best is not None and len(groups) == len(best[1]):
                break  # half the tokens changed nothing: nearly every sample has a microbatch of its own
            if self._plan.program is not None and len(groups) > self._plan.num_microbatches:
                if best is not None:
                    break
                raise RunError(
                    "budget_tokens needs more microbatches than the program of the plan has",
                    microbatches=len(groups),
                    program=self._plan.num_microbatches,
                    hint="a larger budget_tokens, or a plan without given messages, whose order is repeated",
                )
            found = self._best_order(groups)
            if best is None or found[0] < best[0]:
                best = found
        assert best is not None
        return best[1]

    def _best_order(self, groups: list[TokenGroup]) -> tuple[float, list[TokenGroup]]:
        """The predicted makespan of the best order that was tried, and that order."""
        makespan, seconds = self._simulator(len(groups)), self.costs.seconds(groups)
        sizes = np.asarray([group.tokens / self._planned_tokens for group in groups])

        def predicted(order: Sequence[int]) -> float:
            return makespan(seconds[:, :, list(order)], sizes[list(order)])

        work = seconds[Kind.FORWARD].max(0) + seconds[Kind.BACKWARD].max(0)
        descending = sorted(range(len(groups)), key=lambda group: -float(work[group]))
        orders = _orders(descending)
        best, least = orders[0], predicted(orders[0])
        num_affordable = int(_PLANNING_SHARE * least / (_SECONDS_PER_ITEM * makespan.num_items))
        for order in orders[1 : 1 + num_affordable]:
            if (length := predicted(order)) < least:
                best, least = order, length
        return least, [groups[group] for group in best]

    def _simulator(self, count: int) -> Makespans:
        """The simulator of the plan's order for that many microbatches."""
        if count not in self._makespans:
            plan = self._plan
            orders = plan.orders.first(count) if count <= plan.num_microbatches else resized_schedule(plan, count)
            self._makespans[count] = Makespans(lower(orders, cuts=plan.cuts), plan.costs, plan.cluster)
        return self._makespans[count]


def _orders(descending: list[int]) -> list[list[int]]:
    """Orders of microbatches to try, the most promising first; `descending` has the longest first.

    Those with short ones at both ends, which fill and drain the pipeline, are best for most schedules: a search by
    exchanging microbatches found none that is faster by more than 1 %.
    """
    ascending = descending[::-1]
    return [
        ascending[::2] + ascending[1::2][::-1],
        ascending[1::2] + ascending[::2][::-1],
        ascending,
        descending,
    ]
