"""The plot of one trace in a picture: its position and scale, and the title, rank labels and time axis around it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.ir import Trace, number_text, percent_text, round_step, seconds_text, seconds_unit
from penstock.views.drawing import Box, Drawing, Label, Line, cut_end, text_width
from penstock.views.palette import FAINT, IDLE, INK, RULE

MARGIN = 14.0
TITLE = 42.0
AXIS = 26.0
SIZE = 11.0
LEAST_LABEL = 7.0


@dataclass(frozen=True)
class Panel:
    """A plot with one row per rank: its left and top edge, its width, the seconds it spans, and the height of a row."""

    x: float
    y: float
    width: float
    seconds: float
    row: float
    num_ranks: int
    lane: float = 0.0
    """pixels above every row, for marks"""

    def at(self, seconds: float) -> float:
        """The x of a moment."""
        return self.x + (self.width * seconds / self.seconds if self.seconds else 0.0)

    def top(self, rank: int) -> float:
        """The y of the upper edge of a rank's row."""
        return self.y + (self.row + self.lane) * rank + self.lane

    @property
    def gap(self) -> float:
        """Pixels between two rows; the boxes of a row are centred in its height."""
        return min(4.0, 0.15 * self.row)

    @property
    def bottom(self) -> float:
        """The y below the last row."""
        return self.top(self.num_ranks) - self.lane


def place_panels(
    traces: Sequence[Trace], width: float, columns: int, row: float, *, right: float = 0.0, lane: float = 0.0
) -> tuple[list[Panel], float]:
    """One panel per trace in a picture of that width, all on one scale of time; and the height they take together.

    `right` pixels stay free at the right of every panel, and `lane` pixels above every row.
    """
    columns = min(columns, len(traces))
    left = max(text_width(rank_label(trace, trace.num_ranks - 1), SIZE) for trace in traces) + 8
    outer = (width - MARGIN * (columns + 1)) / columns
    seconds = max(trace.makespan for trace in traces)
    placed, y = [], MARGIN
    for first in range(0, len(traces), columns):
        line = traces[first : first + columns]
        for column, trace in enumerate(line):
            x = round(MARGIN + column * (outer + MARGIN) + left)
            plot = max(10.0, outer - left - right - 10)
            placed.append(Panel(x, y + TITLE, plot, seconds, row, trace.num_ranks, lane))
        y += TITLE + (row + lane) * max(trace.num_ranks for trace in line) + AXIS + MARGIN
    return placed, y


def rank_label(trace: Trace, rank: int) -> str:
    """The rank, and its stages where it holds several."""
    stages = trace.program.placement.stages[rank]
    if max(map(len, trace.program.placement.stages)) == 1:
        return f"rank {rank}"
    shown = ",".join(map(str, stages[:4])) + (",.." if len(stages) > 4 else "")
    return f"rank {rank}: {shown}"


def draw_frame(panel: Panel, name: str, trace: Trace) -> Drawing:
    """Title, rank labels and time axis of a panel, and the grey background of every row up to the end of the step."""
    end, height = panel.at(trace.makespan) - panel.x, panel.row - panel.gap
    rows = tuple(Box(panel.x, panel.top(rank) + panel.gap / 2, end, height, IDLE) for rank in range(panel.num_ranks))
    program = trace.program
    figures = f"makespan {seconds_text(trace.makespan)}, bubble {percent_text(trace.bubble)}"
    counts = f"{program.num_ranks} ranks, {program.num_stages} stages, {program.num_microbatches} microbatches"
    if panel.width > text_width(f"{figures}; {counts}", SIZE):
        figures = f"{figures}; {counts}"
    labels = [
        Label(panel.x, panel.y - 31, cut_end(name or "timeline", 14, panel.width), INK, 14),
        Label(panel.x, panel.y - 13, cut_end(figures, SIZE, panel.width), FAINT, SIZE),
    ]
    # Rows lower than a text are labelled at intervals.
    every = max(1, int(np.ceil((LEAST_LABEL + 2) / panel.row)))
    size = min(SIZE, max(LEAST_LABEL, 0.8 * panel.row * every))
    labels += [
        Label(panel.x - 6, panel.top(rank) + panel.row / 2, rank_label(trace, rank), INK, size, "end")
        for rank in range(0, panel.num_ranks, every)
    ]
    scale, unit = seconds_unit(panel.seconds)
    step = round_step(panel.seconds / scale, panel.width / 70)
    ticks = np.arange(0, panel.seconds / scale * (1 + 1e-9), step).tolist()
    y = panel.bottom + 3
    axis = [Line(((panel.x, y), (panel.x + panel.width, y)), RULE)]
    for tick in ticks:
        x = panel.at(tick * scale)
        axis.append(Line(((x, y), (x, y + 4)), RULE))
        text = f"{number_text(tick, 4)} {unit}" if tick in (ticks[0], ticks[-1]) else number_text(tick, 4)
        labels.append(Label(x, y + 13, text, FAINT, 10, "middle"))
    return Drawing(boxes=rows, lines=tuple(axis), labels=tuple(labels))
