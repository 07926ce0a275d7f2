"""Writes the tables of docs/accuracy.md: `python -m benchmarks.accuracy [NAME ...]`.

A table stands between the comments `<!-- NAME -->` and `<!-- end of NAME -->`; the text around it is written by hand.
Without names, all tables are written.
"""

import re
import sys
from pathlib import Path

from benchmarks import layouts, published

PAGE = Path(__file__).parents[1] / "docs/accuracy.md"
TABLES = {
    "summary": published.summary,
    "given": lambda: published.table_of(published.given()),
    "ahead": lambda: published.table_of(published.ahead()),
    "configured": lambda: published.table_of(published.configured()),
    "layouts": layouts.summary,
    "trainings": layouts.table_of_trainings,
}
"""what is written, by name"""


def write(page: Path, tables: dict[str, str]) -> None:
    """Replaces tables of a page; each must be there."""
    text = page.read_text(encoding="utf-8")
    for name, table in tables.items():
        pattern = re.compile(rf"(<!-- {name} -->\n\n).*?(\n\n<!-- end of {name} -->)", re.DOTALL)
        text, count = pattern.subn(lambda found, table=table: found[1] + table + found[2], text)
        if count != 1:
            raise ValueError(f"{page.name} must have one table {name}, got {count}")
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(PAGE, {name: TABLES[name]() for name in sys.argv[1:] or TABLES})
