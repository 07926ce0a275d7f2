"""Writes the tables of README.md and docs/accuracy.md that hold results: `python -m benchmarks.documents [NAME ...]`.

A table is between the comments `<!-- begin NAME -->` and `<!-- end NAME -->`. Without names, all tables are written.
`measured` reads benchmarks/results.json. The others are computed, which takes minutes, and need the published data.
"""

import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

from benchmarks import layouts, published, results

_ROOT = Path(__file__).parents[1]
README, ACCURACY = _ROOT / "README.md", _ROOT / "docs/accuracy.md"


def measured(runs: dict[str, results.Run]) -> str:
    """README's table "Measured": the rows whose benchmarks were run."""
    rows = ["| what | result | target | met | command |", "|---|---|---|---|---|"]
    for row in results.readme_rows(runs):
        met = "yes" if row.is_met else "**no**"
        rows.append(f"| {row.what} | {row.result} | {row.target} | {met} | `B {row.benchmark}` |")
    shown = {name: run for name, run in runs.items() if any(row.benchmark == name for row in results.ROWS)}
    machines = sorted({run.machine for run in shown.values()})
    dates = sorted(
        {table.date for name, run in shown.items() for table in run.tables if results.is_in_readme(name, table)}
    )
    text = (
        f"On {' and '.join(machines)}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}. Each row is from one run. "
        "`B` is `.venv/bin/python -m benchmarks`."
    )
    return "\n".join((textwrap.fill(text, 120), "", *rows))


TABLES: dict[str, tuple[Path, Callable[[], str]]] = {
    "measured": (README, lambda: measured(results.read())),
    "summary": (ACCURACY, published.summary),
    "given": (ACCURACY, lambda: published.table_of(published.given())),
    "ahead": (ACCURACY, lambda: published.table_of(published.ahead())),
    "configured": (ACCURACY, lambda: published.table_of(published.configured())),
    "layouts": (ACCURACY, layouts.summary),
    "trainings": (ACCURACY, layouts.table_of_trainings),
}
"""the page of each table, and the function that makes it"""
_FROM_TRACES = ("summary", "given", "ahead")
"""tables that would lose rows without the traces"""


def replace_table(text: str, name: str, table: str) -> str:
    """Returns the text of a page with one table replaced; raises ValueError if the page does not have it once."""
    pattern = re.compile(rf"(<!-- begin {name} -->\n\n?).*?(\n\n?<!-- end {name} -->)", re.DOTALL)
    text, count = pattern.subn(lambda match: match[1] + table + match[2], text)
    if count != 1:
        raise ValueError(f"the page must have one table {name}, got {count}")
    return text


if __name__ == "__main__":
    for name in sys.argv[1:] or TABLES:
        if name not in TABLES:
            sys.exit(f"unknown table (name: {name})\ntry: {', '.join(TABLES)}")
        if name in _FROM_TRACES and next(published.recordings(), None) is None:
            sys.exit(f"table {name} needs the published traces\ntry: pip install pyarrow, and PENSTOCK_PUBLISHED=DIR")
        page, make = TABLES[name]
        page.write_text(replace_table(page.read_text(encoding="utf-8"), name, make()), encoding="utf-8")
