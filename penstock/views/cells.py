"""Cells: time cut into equal steps, and which block each rank shows in each step."""

import numpy as np
from numpy.typing import NDArray

from penstock.views.blocks import LOWER, Blocks

IDLE = -1
MAX_STEPS_PER_PASS = 8
_TOLERANCE = 1e-6


def common_step(blocks: Blocks) -> float | None:
    """The largest step of which every start and end is a multiple; None if the shortest pass would fill many steps."""
    lengths = blocks.end - blocks.start
    makespan = float(blocks.end.max(initial=0.0))
    if makespan <= 0 or not (lengths > _TOLERANCE * makespan).any():
        return None
    least = float(lengths[lengths > _TOLERANCE * makespan].min()) / MAX_STEPS_PER_PASS
    step = makespan
    for moment in np.unique(np.concatenate((lengths, blocks.start, blocks.end))).tolist():
        step = _divisor(step, moment, _TOLERANCE * makespan)
        if step < least * (1 - _TOLERANCE):
            return None
    return makespan / round(makespan / step)


def _divisor(one: float, other: float, tolerance: float) -> float:
    while other > tolerance:
        one, other = other, one % other
        other = 0.0 if one - other < tolerance else other
    return one


def typical_step(blocks: Blocks) -> float:
    """A step for traces without a common one: nine of ten passes last at least as long."""
    lengths = blocks.end - blocks.start
    return float(np.quantile(lengths[lengths > 0], 0.1)) if (lengths > 0).any() else 1.0


def num_steps(blocks: Blocks, step: float) -> int:
    """How many steps the trace takes; one that it fills by less than half does not count, except the first."""
    steps = float(blocks.end.max(initial=0.0)) / step
    return max(int(steps + 0.5), 1 if steps else 0)


def cells(blocks: Blocks, step: float, columns: int) -> NDArray[np.int64]:
    """Per row and step the block that fills most of it, or IDLE where most of it is idle.

    Row 2r shows rank r; row 2r + 1 shows its backward passes of overlapped pairs.
    """
    owner, row, column, filled = coverage(blocks, step, columns)
    place = row * columns + column
    total = np.bincount(place, filled, minlength=2 * blocks.trace.num_ranks * columns)
    grid = np.full(len(total), IDLE, dtype=np.int64)
    # Of several assignments to one place the last one stays: the largest, or of equals the first in the program.
    sequence = np.lexsort((-owner, filled))
    grid[place[sequence]] = owner[sequence]
    grid[total < step / 2] = IDLE
    return grid.reshape(2 * blocks.trace.num_ranks, columns)


def proportional(blocks: Blocks, step: float, columns: int) -> NDArray[np.int64]:
    """The same rows for steps longer than passes: every kind of every stage fills as many cells as it takes time.

    A cell shows what is owed most at its place: idle time and kinds gather seconds along the row and pay with cells.
    """
    colors, color_of = np.unique(blocks.passes.kind * blocks.num_chunks + blocks.chunk, return_inverse=True)
    owner, row, column, filled = coverage(blocks, step, columns)
    shape = (2 * blocks.trace.num_ranks, columns, len(colors))
    place = np.ravel_multi_index((row, column, color_of[owner]), shape)
    shares = np.bincount(place, filled / step, int(np.prod(shape))).reshape(shape)
    shares = np.concatenate((shares, np.maximum(0.0, 1.0 - shares.sum(axis=2, keepdims=True))), axis=2)
    examples = np.append(np.unique(color_of, return_index=True)[1], IDLE)
    owed = np.zeros((shape[0], len(examples)))
    grid = np.full(shape[:2], IDLE, dtype=np.int64)
    for step_number in range(columns):
        owed += shares[:, step_number]
        # What a cell holds nothing of is not shown there, however much of it is owed.
        best = np.where(shares[:, step_number] > _TOLERANCE, owed, -np.inf).argmax(axis=1)
        owed[np.arange(len(owed)), best] -= 1.0
        grid[:, step_number] = examples[best]
    return grid


def coverage(
    blocks: Blocks, step: float, columns: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """For every block and every step it touches: the block, its row, the step, and the seconds of the step it fills."""
    # A recorded clock may run a little ahead of the start of the step.
    first = np.maximum(np.floor(blocks.start / step + _TOLERANCE).astype(np.int64), 0)
    last = np.minimum(np.ceil(blocks.end / step - _TOLERANCE).astype(np.int64), columns)
    counts = np.maximum(last - first, 0)
    owner = np.repeat(np.arange(len(blocks), dtype=np.int64), counts)
    column = np.arange(len(owner), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts) + first[owner]
    filled = np.minimum(blocks.end[owner], (column + 1) * step) - np.maximum(blocks.start[owner], column * step)
    return owner, 2 * blocks.rank[owner] + (blocks.half[owner] == LOWER), column, filled
