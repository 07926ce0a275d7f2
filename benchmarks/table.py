"""Tables of measured values, each compared with its target."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime


@dataclass(frozen=True)
class Line:
    """One row of a table: the cells to print, and the value that is compared with the target.

    The value must be at least the target, or at most with `at_least=False`. An infinite target means that there is
    none: the row is for information.
    """

    cells: tuple[str, ...]
    value: float
    target: float
    at_least: bool = True

    @property
    def passes(self) -> bool:
        """Whether the value meets the target."""
        return self.value >= self.target if self.at_least else self.value <= self.target

    @property
    def row(self) -> tuple[str, ...]:
        """The cells, the target, and PASS or FAIL."""
        if math.isinf(self.target):
            return (*self.cells, "none", "")
        sign = ">=" if self.at_least else "<="
        return (*self.cells, f"{sign} {self.target:,g}", "PASS" if self.passes else "FAIL")


@dataclass(frozen=True)
class Table:
    """A title, column names, and lines; the lines may be a generator that measures each one when it is requested."""

    title: str
    columns: tuple[str, ...]
    lines: Iterable[Line]
    date: str = ""
    """when the lines were measured; empty before"""

    @property
    def passes(self) -> bool:
        """Whether all lines meet their targets."""
        return all(line.passes for line in self.lines)

    def show(self) -> "Table":
        """Measures the lines, prints each as soon as it is measured, and returns the table with the list of them."""
        print(f"\n{self.title}\n{_text((*self.columns, 'target', ''))}", flush=True)
        lines = []
        for line in self.lines:
            print(_text(line.row), flush=True)
            lines.append(line)
        return replace(self, lines=lines, date=f"{datetime.now(UTC):%Y-%m-%d}")


def _text(row: tuple[str, ...]) -> str:
    columns = "".join(f"{cell:>12}" for cell in row[1:-1])
    return f"  {row[0]:<16}{columns}  {row[-1]}".rstrip()
