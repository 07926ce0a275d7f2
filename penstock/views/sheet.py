"""Sheet: rows of text under a header, written as Markdown or drawn by rich; the first column is names, the rest figures."""

from dataclasses import dataclass

from rich import box
from rich.table import Table as RichTable
from rich.text import Text


@dataclass(frozen=True)
class Sheet:
    """A table of texts; all rows are as long as the header."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """Lines of a Markdown table, readable as they are."""
        cells = [[text.replace("|", "\\|") for text in row] for row in (self.header, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [_line([_aligned(text, width, place) for place, (text, width) in enumerate(zip(row, widths))]) for row in cells]
        rule = _line([":" + "-" * (width - 1) if not place else "-" * (width - 1) + ":" for place, width in enumerate(widths)])
        return "\n".join([lines[0], rule, *lines[1:]])

    def rich(self) -> RichTable:
        """The same for a console, where long headers may take two lines."""
        table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for place, text in enumerate(self.header):
            table.add_column(Text(text), justify="right" if place else "left", overflow="fold", style="" if place else "bold")
        for row in self.rows:
            table.add_row(*map(Text, row))
        return table


def _aligned(text: str, width: int, place: int) -> str:
    return text.rjust(width) if place else text.ljust(width)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
