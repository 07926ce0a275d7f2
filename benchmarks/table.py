"""Tables of results, each compared with its target."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Line:
    """Figures to show and the one that counts; `at_least` says on which side of the target it must be.

    An infinite target, which every value meets, is none: the figures are reported only.
    """

    cells: tuple[str, ...]
    value: float
    target: float
    at_least: bool = True

    @property
    def passes(self) -> bool:
        """Whether the target is met."""
        return self.value >= self.target if self.at_least else self.value <= self.target

    @property
    def row(self) -> tuple[str, ...]:
        """The cells, the target and the verdict."""
        if math.isinf(self.target):
            return (*self.cells, "none", "")
        sign = ">=" if self.at_least else "<="
        return (*self.cells, f"{sign} {self.target:,g}", "PASS" if self.passes else "FAIL")


@dataclass(frozen=True)
class Table:
    """A title, names of columns, and lines that are measured as they are asked for."""

    title: str
    columns: tuple[str, ...]
    lines: Iterable[Line]

    @property
    def passes(self) -> bool:
        """Whether all lines pass; measures them, unless they are those of a table that was shown."""
        return all(line.passes for line in self.lines)

    def show(self) -> "Table":
        """Print line after line as they come in; returns the table with all of them."""
        print(f"\n{self.title}\n{_text((*self.columns, 'target', ''))}", flush=True)
        lines = []
        for line in self.lines:
            print(_text(line.row), flush=True)
            lines.append(line)
        return replace(self, lines=lines)


def _text(row: tuple[str, ...]) -> str:
    figures = "".join(f"{cell:>12}" for cell in row[1:-1])
    return f"  {row[0]:<16}{figures}  {row[-1]}".rstrip()
