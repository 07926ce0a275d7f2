"""A trace as coloured text at the width of the terminal.

Choose it to see a trace without another program. Colours are kinds, lighter shades are later stages of a rank; a pass
is named at its left end as far as there is room. A long trace is compressed, never cut: where passes are shorter than
a character, the number of letters is proportional to time. Without colours a pass is continued by dashes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from rich.console import Console, ConsoleOptions
from rich.style import Style
from rich.text import Text

from penstock.ir import Ints, Trace, percent_text, seconds_text
from penstock.views import palette
from penstock.views.bars import LETTERS, ROUNDING, WORDS, Bars
from penstock.views.base import RichView, Traces, check_positive, printed, traces_by_name

IDLE = -1
"""in a grid of indices of bars: no bar"""
MAX_STEPS_PER_PASS = 8
_IDLE_STYLE = Style(bgcolor="#3a3f46")


@dataclass(frozen=True)
class Terminal(RichView[Traces]):
    """Text with colours; a rich console prints it at its own width."""

    width: int = 120
    """characters per line of the returned text"""
    color: bool = True
    """whether the returned text contains the escape codes of colours"""
    name = "terminal"
    record = Trace
    suffix = ".ansi"

    def __post_init__(self) -> None:
        check_positive(width=self.width)

    def __call__(self, traces: Traces) -> str:
        return printed(self.renderable(traces), self.width, self.color)

    def renderable(self, traces: Traces) -> "Screen":
        return Screen(tuple(traces_by_name(traces).items()))


@dataclass(frozen=True)
class Screen:
    """Traces that are laid out when a console prints them."""

    traces: tuple[tuple[str, Trace], ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        colored = console.color_system is not None and not console.no_color
        for place, (name, trace) in enumerate(self.traces):
            if place:
                yield Text()
            for line in _lines(name, Bars.of(trace), options.max_width, colored):
                line.no_wrap, line.overflow = True, "crop"
                line.truncate(options.max_width)
                yield line


def _lines(name: str, bars: Bars, width: int, colored: bool) -> Iterator[Text]:
    """The metrics of a trace, a line per rank (two if passes overlap), and the legend."""
    digits = len(str(bars.trace.num_ranks - 1))
    room = max(1, width - len("rank  ") - digits)
    # A common step gets as many characters as its label and a blank need, or the most that fit.
    step = least = (bars.trace.makespan or 1.0) / room
    common = common_step(bars)
    if common is not None and common >= least:
        label = max(map(len, bars.labels), default=1) + 1
        step = common / min(label, int(common / least * (1 + 1e-9)))
    # A last step that is filled by less than half gets no character.
    columns = min(room, max(1, int(float(bars.end.max(initial=0.0)) / step + 0.5)))
    lengths = bars.end - bars.start
    is_dense = bool(len(lengths)) and float(np.median(lengths)) < step
    # With several passes per character, the largest of each would hide all shorter kinds.
    rows = (_proportional_cells if is_dense else _largest_cells)(bars, step, columns).tolist()
    metrics = f"makespan {seconds_text(bars.trace.makespan)}, bubble {percent_text(bars.trace.bubble)}"
    note = f"; a letter is {seconds_text(step, 2)}" if is_dense else ""
    yield Text(f"{name}: {metrics}{note}" if name else f"{metrics}{note}", Style(bold=True))
    for rank in range(bars.trace.num_ranks):
        yield Text(f"rank {rank:>{digits}} ").append_text(_row(bars, rows[2 * rank], colored, is_dense))
        if bars.has_pairs:
            second = _row(bars, rows[2 * rank + 1], colored, is_dense, is_second=True)
            yield Text(" " * (6 + digits)).append_text(second)
    legend = Text()
    for kind in bars.kinds:
        legend.append(f" {LETTERS[kind]} ", _style(palette.fill(kind, 0, 1)) if colored else None)
        legend.append(f"{' ' if colored else ''}{WORDS[kind]} ")
    if bars.num_chunks > 1 and colored:
        for chunk in range(min(bars.num_chunks, 8)):
            legend.append("  ", _style(palette.fill(bars.kinds[0], chunk, bars.num_chunks)))
        legend.append(" first to last stage of a rank")
    yield legend


def common_step(bars: Bars) -> float | None:
    """The largest step of which every start and end is a multiple, such as the second of a schedule with unit costs.

    None if there is none, or if the shortest pass would fill more than MAX_STEPS_PER_PASS of them.
    """
    lengths = bars.end - bars.start
    makespan = float(bars.end.max(initial=0.0))
    tolerance = ROUNDING * makespan
    if makespan <= 0 or not (lengths > tolerance).any():
        return None
    least = float(lengths[lengths > tolerance].min()) / MAX_STEPS_PER_PASS
    step = makespan
    for moment in np.unique(np.concatenate((lengths, bars.start, bars.end))).tolist():
        # Euclid's algorithm, with remainders within the tolerance of 0 or of the divisor taken as 0.
        while moment > tolerance:
            step, moment = moment, step % moment
            moment = 0.0 if step - moment < tolerance else moment
        if step < least * (1 - ROUNDING):
            return None
    return makespan / round(makespan / step)


def _largest_cells(bars: Bars, step: float, columns: int) -> Ints:
    """Per row and step the bar that fills most of it, or IDLE where most of it is idle."""
    owner, row, column, filled = bars.coverage(step, columns)
    place = row * columns + column
    total = np.bincount(place, filled, minlength=2 * bars.trace.num_ranks * columns)
    grid = np.full(len(total), IDLE, dtype=np.int64)
    # Of several assignments to one place the last one stays: the largest, or of equals the first in the program.
    sequence = np.lexsort((-owner, filled))
    grid[place[sequence]] = owner[sequence]
    grid[total < step / 2] = IDLE
    return grid.reshape(2 * bars.trace.num_ranks, columns)


def _proportional_cells(bars: Bars, step: float, columns: int) -> Ints:
    """The same rows for steps longer than passes: every kind of every stage fills cells in proportion to its time.

    Along a row, each kind and idle time accumulate their share of every cell; the cell shows the largest sum, which
    is then reduced by one cell.
    """
    colors, color_of = np.unique(bars.passes.kind * bars.num_chunks + bars.chunk, return_inverse=True)
    owner, row, column, filled = bars.coverage(step, columns)
    shape = (2 * bars.trace.num_ranks, columns, len(colors))
    place = np.ravel_multi_index((row, column, color_of[owner]), shape)
    shares = np.bincount(place, filled / step, int(np.prod(shape))).reshape(shape)
    shares = np.concatenate((shares, np.maximum(0.0, 1.0 - shares.sum(axis=2, keepdims=True))), axis=2)
    examples = np.append(np.unique(color_of, return_index=True)[1], IDLE)
    owed = np.zeros((shape[0], len(examples)))
    grid = np.full(shape[:2], IDLE, dtype=np.int64)
    for number in range(columns):
        owed += shares[:, number]
        # A kind that does not occur within a cell is not shown there, however large its sum is.
        best = np.where(shares[:, number] > ROUNDING, owed, -np.inf).argmax(axis=1)
        owed[np.arange(len(owed)), best] -= 1.0
        grid[:, number] = examples[best]
    return grid


def _row(bars: Bars, row: list[int], colored: bool, is_dense: bool, is_second: bool = False) -> Text:
    """One line: per pass a stretch of its colour with its name, or in a dense row one letter per character."""
    text = Text()
    for bar, run in groupby(row):
        length = len(list(run))
        if bar == IDLE:
            blank = " " if is_second or colored else "."
            text.append(blank * length, _IDLE_STYLE if colored and not is_second else None)
            continue
        short = bars.short_labels[bar]
        if is_dense:
            written = short[0] * length
        else:
            # Colours show the kind, so a single character can be the last digit of the microbatch.
            names = (bars.labels[bar], short, short[-1] if colored else short[0])
            label = next(name for name in names if len(name) <= length or len(name) == 1)
            written = label.ljust(length, " " if colored else "-")
        color = palette.fill(int(bars.passes.kind[bar]), int(bars.chunk[bar]), bars.num_chunks)
        text.append(written, _style(color) if colored else None)
    return text


def _style(color: str) -> Style:
    return Style(color=palette.text_on(color), bgcolor=color)
