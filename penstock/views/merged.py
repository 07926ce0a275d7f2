"""Merged: the blocks of a trace laid out in a panel where they are too many, or too narrow, for a box each.

Time is cut into slices of whole pixels. In a slice the height of a colour is its share of the rank's time, and what
stays empty is idle. That bounds a trace to about MAX_BOXES boxes (2 MB of SVG) however long it is.
"""

import numpy as np
from numpy.typing import NDArray

from penstock.views.blocks import WHOLE, Blocks
from penstock.views.cells import coverage
from penstock.views.drawing import Box, Drawing
from penstock.views.palette import fill
from penstock.views.panel import Panel

MAX_BOXES = 20_000
MIN_WIDTH = 1.5
SLICE = 3.0


def are_merged(blocks: Blocks, panel: Panel) -> bool:
    """Whether there are more than MAX_BOXES blocks, or so many that half of them are narrower than MIN_WIDTH pixels."""
    if not len(blocks) or not panel.seconds:
        return False
    width = float(np.median(blocks.end - blocks.start)) * panel.width / panel.seconds
    return len(blocks) > MAX_BOXES or (width < MIN_WIDTH and len(blocks) > panel.width)


def merged(blocks: Blocks, panel: Panel) -> Drawing:
    """The boxes of all slices, neighbours of equal heights joined."""
    colors, color_of = np.unique(blocks.passes.kind * blocks.num_chunks + blocks.chunk, return_inverse=True)
    pixels = int(np.ceil(max(SLICE, panel.width * len(colors) * panel.num_ranks / MAX_BOXES)))
    shares = _shares(blocks, panel, color_of, pixels)
    heights = np.round(2 * shares * (panel.row - panel.gap)) / 2
    pairs = (divmod(color, blocks.num_chunks) for color in colors.tolist())
    fills = [fill(kind, chunk, blocks.num_chunks) for kind, chunk in pairs]
    placed = []
    for rank in range(panel.num_ranks):
        for first, last in _runs(heights[rank]):
            left, right = panel.x + first * pixels, min(panel.x + last * pixels, panel.x + panel.width)
            ground = Box(left, panel.top(rank) + panel.gap / 2, right - left, 0.0, "")
            placed += _stack(ground, heights[rank, first].tolist(), fills)
    return Drawing(0, 0, boxes=tuple(placed))


def _shares(blocks: Blocks, panel: Panel, color_of: NDArray[np.int64], pixels: int) -> NDArray[np.float64]:
    """By rank, slice and colour the share of the slice that the colour fills."""
    step, slices = panel.seconds * pixels / panel.width, int(np.ceil(panel.width / pixels))
    shape = (panel.num_ranks, slices, int(color_of.max()) + 1)
    owner, row, column, filled = coverage(blocks, step, slices)
    weight = np.where(blocks.half[owner] == WHOLE, 1.0, 0.5)
    place = np.ravel_multi_index((row // 2, column, color_of[owner]), shape)
    return np.minimum(np.bincount(place, filled * weight / step, int(np.prod(shape))), 1.0).reshape(shape)


def _runs(heights: NDArray[np.float64]) -> list[tuple[int, int]]:
    """First and last slice (exclusive) of every run of slices that look the same."""
    edges = (np.flatnonzero((heights[1:] != heights[:-1]).any(axis=1)) + 1).tolist()
    return list(zip((0, *edges), (*edges, len(heights)), strict=True))


def _stack(ground: Box, heights: list[float], fills: list[str]) -> list[Box]:
    """One box per colour, each below the one before it."""
    tops = [ground.y + sum(heights[:color]) for color in range(len(heights))]
    columns = zip(tops, heights, fills, strict=True)
    return [ground._replace(y=top, height=height, fill=fill) for top, height, fill in columns if height]
