"""Sheet: rows of text under a header, written as Markdown or drawn by rich."""

from dataclasses import dataclass

from rich import box
from rich.table import Table as RichTable
from rich.text import Text


@dataclass(frozen=True)
class Sheet:
    """A table of texts: names in the first columns, figures in the others."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    names: int = 1
    """how many columns hold names"""

    def markdown(self) -> str:
        """Lines of a Markdown table, readable as they are."""
        cells = [[text.replace("|", "\\|") for text in row] for row in (self.header, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        rules = ["-" * (width - 1) for width in widths]
        lines = [_line(row, widths) for row in cells]
        return "\n".join([lines[0], _line([f":{rules[0]}", *(f"{rule}:" for rule in rules[1:])], widths), *lines[1:]])

    def rich(self) -> RichTable:
        """The same for a console, where long headers may take two lines."""
        table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for place, text in enumerate(self.header):
            if place:
                table.add_column(Text(text), justify="right", min_width=max(map(len, text.split()), default=1))
            else:
                table.add_column(Text(text), no_wrap=True, style="bold")
        for row in self.rows:
            table.add_row(*map(Text, row))
        return table


def _line(row: list[str], widths: list[int]) -> str:
    figures = (text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True))
    return f"| {' | '.join((row[0].ljust(widths[0]), *figures))} |"
