"""terminal: a trace as coloured text that fits the width of the terminal.

Choose it to look at a trace where you are. Colours are kinds, lighter shades are later stages of a rank; a pass is
named at its left end, as in `grid`, as far as there is room. A long trace is compressed, never cut: where passes are
shorter than a character, letters stand in the proportion of time. Without colours a pass is continued by dashes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import numpy as np
from rich.console import Console, ConsoleOptions
from rich.style import Style
from rich.text import Text

from penstock.ir import Trace, percent_text, seconds_text
from penstock.views import palette
from penstock.views.base import RichView, Traces, check_positive, named, printed
from penstock.views.blocks import LETTERS, WORDS, Blocks
from penstock.views.cells import IDLE, cells, common_step, num_steps, proportional

_IDLE_STYLE = Style(bgcolor="#3a3f46")


@dataclass(frozen=True)
class Terminal(RichView[Traces]):
    """Text with colours, as wide as asked; printed by rich, as wide as the console."""

    width: int = 120
    """characters per line of the text that the call gives"""
    color: bool = True
    """whether the text that the call gives holds the codes for colours"""
    name = "terminal"
    noun = Trace
    suffix = ".ansi"

    def __post_init__(self) -> None:
        check_positive(width=self.width)

    def __call__(self, traces: Traces) -> str:
        return printed(self.renderable(traces), self.width, self.color)

    def renderable(self, traces: Traces) -> "Screen":
        return Screen(tuple(named(traces).items()))


@dataclass(frozen=True)
class Screen:
    """Traces that lay themselves out when a console prints them."""

    traces: tuple[tuple[str, Trace], ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        colored = console.color_system is not None and not console.no_color
        for place, (name, trace) in enumerate(self.traces):
            if place:
                yield Text()
            for line in _lines(name, Blocks.of(trace), options.max_width, colored):
                line.no_wrap, line.overflow = True, "crop"
                line.truncate(options.max_width)
                yield line


def _lines(name: str, blocks: Blocks, width: int, colored: bool) -> Iterator[Text]:
    digits = len(str(blocks.trace.num_ranks - 1))
    room = max(1, width - len("rank  ") - digits)
    step = _seconds_per_character(blocks, room)
    columns = min(room, max(1, num_steps(blocks, step)))
    lengths = blocks.end - blocks.start
    is_dense = bool(len(lengths)) and float(np.median(lengths)) < step
    rows = (proportional if is_dense else cells)(blocks, step, columns).tolist()
    figures = f"makespan {seconds_text(blocks.trace.makespan)}, bubble {percent_text(blocks.trace.bubble)}"
    note = f"; a letter is {seconds_text(step, 2)}" if is_dense else ""
    yield Text(f"{name}: {figures}{note}" if name else f"{figures}{note}", Style(bold=True))
    draw = partial(_letters if is_dense else _runs, blocks, colored)
    for rank in range(blocks.trace.num_ranks):
        yield Text(f"rank {rank:>{digits}} ").append_text(draw(rows[2 * rank]))
        if blocks.has_pairs:
            yield Text(" " * (6 + digits)).append_text(draw(rows[2 * rank + 1], is_second=True))
    yield _legend(blocks, colored)


def _seconds_per_character(blocks: Blocks, room: int) -> float:
    """A step of the trace takes as many characters as its label and a blank need, or the most that fit."""
    least = (blocks.trace.makespan or 1.0) / room
    step = common_step(blocks)
    if step is None or step < least:
        return least
    label = max(map(len, blocks.labels), default=1) + 1
    return step / min(label, int(step / least * (1 + 1e-9)))


def _runs(blocks: Blocks, colored: bool, row: list[int], is_second: bool = False) -> Text:
    """One line: a stretch of one colour per pass, named as fully as it is long."""
    text = Text()
    for block, run in groupby(row):
        length = len(list(run))
        if block == IDLE:
            text.append_text(_idle(length, colored, is_second))
            continue
        short = blocks.short_labels[block]
        # Colours show the kind, so that a single character can be the last digit of the microbatch.
        names = (blocks.labels[block], short, short[-1] if colored else short[0])
        label = next(name for name in names if len(name) <= length or len(name) == 1)
        text.append(label.ljust(length, " " if colored else "-"), _style(blocks, block) if colored else None)
    return text


def _letters(blocks: Blocks, colored: bool, row: list[int], is_second: bool = False) -> Text:
    """One line: a letter of the kind per character."""
    text = Text()
    for block, run in groupby(row):
        length = len(list(run))
        if block == IDLE:
            text.append_text(_idle(length, colored, is_second))
        else:
            text.append(blocks.short_labels[block][0] * length, _style(blocks, block) if colored else None)
    return text


def _idle(length: int, colored: bool, is_second: bool) -> Text:
    if is_second:
        return Text(" " * length)
    return Text(" " * length, _IDLE_STYLE) if colored else Text("." * length)


def _style(blocks: Blocks, block: int) -> Style:
    return _on(palette.fill(int(blocks.passes.kind[block]), int(blocks.chunk[block]), blocks.num_chunks))


def _on(color: str) -> Style:
    return Style(color=palette.text_on(color), bgcolor=color)


def _legend(blocks: Blocks, colored: bool) -> Text:
    text = Text()
    for kind in blocks.kinds:
        text.append(f" {LETTERS[kind]} ", _on(palette.fill(kind, 0, 1)) if colored else None)
        text.append(f"{' ' if colored else ''}{WORDS[kind]} ")
    if blocks.num_chunks > 1 and colored:
        for chunk in range(min(blocks.num_chunks, 8)):
            text.append("  ", _on(palette.fill(blocks.kinds[0], chunk, blocks.num_chunks)))
        text.append(" first to last stage of a rank")
    return text
