"""Marks: above the rows of a panel whose boxes are too narrow for text, what some of the boxes are.

A pass is marked where it starts. As there is no room for all, those of round microbatches, 0, 32, 16 ..., come first.
"""

from bisect import bisect_left

import numpy as np

from penstock.ir import COMPUTE_KINDS
from penstock.views.blocks import Blocks
from penstock.views.drawing import Drawing, Label, Line, text_width
from penstock.views.merged import are_merged
from penstock.views.palette import FAINT, INK
from penstock.views.panel import LEAST_LABEL, Panel

LANE = 10.0
LEAST_ROW = 8.0
LEAST_WIDTH = 8.0
SPACE = 9.0


def are_marked(blocks: Blocks, panel: Panel) -> bool:
    """Whether half of the boxes are too narrow for their text, while each still is a box in a row that can be seen."""
    if not len(blocks) or panel.row < LEAST_ROW or are_merged(blocks, panel):
        return False
    seconds = float(np.median(blocks.end - blocks.start))
    return 0 < seconds * panel.width < LEAST_WIDTH * panel.seconds


def marks(blocks: Blocks, panel: Panel) -> Drawing:
    """A stroke and the text of a pass, above where it starts."""
    lines, labels = [], []
    for block in _chosen(blocks, panel):
        x, floor = panel.at(float(blocks.start[block])), panel.top(int(blocks.rank[block])) + panel.gap / 2
        lines.append(Line(((x, floor - LANE + 2), (x, floor)), FAINT, 0.7))
        labels.append(Label(x + 1.5, floor - LANE / 2, blocks.labels[block], INK, LEAST_LABEL))
    return Drawing(0, 0, lines=tuple(lines), labels=tuple(labels))


def _chosen(blocks: Blocks, panel: Panel) -> list[int]:
    """The passes that have room; those of rounder microbatches (0, 32, 16, 48, 8 ...) choose before the others."""
    microbatch = blocks.passes.microbatch
    roundness = np.where(microbatch > 0, microbatch & -microbatch, np.iinfo(np.int64).max)  # its divisor 1, 2, 4, 8 ...
    passes = np.flatnonzero(np.isin(blocks.passes.kind, COMPUTE_KINDS))
    sequence = passes[np.lexsort((blocks.start[passes], -roundness[passes]))]
    taken: list[list[tuple[float, float]]] = [[] for _ in range(panel.num_ranks)]
    chosen = []
    for block in sequence.tolist():
        x = panel.at(float(blocks.start[block]))
        if _takes(taken[int(blocks.rank[block])], x, x + text_width(blocks.labels[block], LEAST_LABEL) + SPACE):
            chosen.append(block)
    return chosen


def _takes(taken: list[tuple[float, float]], left: float, right: float) -> bool:
    """Whether nothing stands between left and right; if so it is taken from now on."""
    place = bisect_left(taken, (left, right))
    is_free = (place == 0 or taken[place - 1][1] <= left) and (place == len(taken) or right <= taken[place][0])
    if is_free:
        taken.insert(place, (left, right))
    return is_free
