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
        rule = [f":{line}" if place < self.names else f"{line}:" for place, line in enumerate(rules)]
        lines = [self._line(row, widths) for row in (cells[0], rule, *cells[1:])]
        return "\n".join(lines)

    def rich(self) -> RichTable:
        """The same for a console, where long headers may take two lines."""
        table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for place, text in enumerate(self.header):
            if place >= self.names:
                table.add_column(Text(text), justify="right", min_width=max(map(len, text.split()), default=1))
            elif self.names > 1:
                table.add_column(Text(text), overflow="fold", style="" if place else "bold")
            else:
                table.add_column(Text(text), no_wrap=True, style="bold")
        for row in self.rows:
            table.add_row(*map(Text, row))
        return table

    def _line(self, row: list[str], widths: list[int]) -> str:
        pairs = enumerate(zip(row, widths, strict=True))
        texts = (text.ljust(width) if place < self.names else text.rjust(width) for place, (text, width) in pairs)
        return f"| {' | '.join(texts)} |"
