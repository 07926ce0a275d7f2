"""Boxes: the blocks of a trace laid out in a panel, one box each."""

from penstock.ir import Kind, seconds_text
from penstock.views.blocks import LOWER, UPPER, WHOLE, WORDS, Blocks
from penstock.views.drawing import Box, Drawing, Label, text_width
from penstock.views.palette import fill, text_on
from penstock.views.panel import LEAST_LABEL, SIZE, Panel

MAX_TIPS = 10_000


def boxes(blocks: Blocks, panel: Panel) -> Drawing:
    """A box per block, with the text that fits into it."""
    placed = [_box(blocks, panel, block) for block in range(len(blocks))]
    labels = []
    for box, text in zip(placed, _texts(blocks, placed), strict=True):
        if size := _size_in(box, text):
            labels.append(Label(box.x + box.width / 2, box.y + box.height / 2, text, text_on(box.fill), size, "middle"))
    if len(blocks) <= MAX_TIPS:
        placed = [box._replace(tip=_tip(blocks, block)) for block, box in enumerate(placed)]
    return Drawing(0, 0, boxes=tuple(placed), labels=tuple(labels))


def _texts(blocks: Blocks, placed: list[Box]) -> list[str]:
    """Stage, kind and microbatch where three of four such texts fit; else no stage, and the kind where it fits."""
    fitting = sum(_size_in(box, label) > 0 for box, label in zip(placed, blocks.labels, strict=True))
    if 4 * fitting >= 3 * len(placed):
        return list(blocks.labels)
    return [
        label if _size_in(box, label) else label[1:] for box, label in zip(placed, blocks.short_labels, strict=True)
    ]


def _size_in(box: Box, text: str) -> float:
    """The font size at which the text fits; 0 where it cannot be read."""
    size = min(SIZE, 0.75 * box.height, (box.width - 1.5) / text_width(text, 1.0)) if text else 0.0
    return size if size >= LEAST_LABEL else 0.0


def _box(blocks: Blocks, panel: Panel, block: int) -> Box:
    """Where one block stands."""
    rank, half = int(blocks.rank[block]), int(blocks.half[block])
    left, right = panel.at(float(blocks.start[block])), panel.at(float(blocks.end[block]))
    height = (panel.row - panel.gap) / (1 if half == WHOLE else 2)
    top = panel.top(rank) + panel.gap / 2 + (height if half == LOWER else 0.0)
    color = fill(int(blocks.passes.kind[block]), int(blocks.chunk[block]), blocks.num_chunks)
    # A hairline of background keeps neighbours of one colour apart; a block of no length stays visible.
    slit = 0.8 if right - left > 4 else 0.0
    return Box(left, top, max(0.8, right - left - slit), height - (0.6 if half == UPPER else 0.0), color)


def _tip(blocks: Blocks, block: int) -> str:
    passes, start, end = blocks.passes, float(blocks.start[block]), float(blocks.end[block])
    what = f"{WORDS[Kind(int(passes.kind[block]))]} of stage {passes.stage[block]}"
    where = f"microbatch {passes.microbatch[block]}, rank {blocks.rank[block]}"
    return f"{what}, {where}: {seconds_text(start)} to {seconds_text(end)}"
