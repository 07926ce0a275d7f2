"""Writes README's table "Measured" from `benchmarks/results.json`: `python -m benchmarks.readme`."""

from pathlib import Path

from benchmarks import results

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- begin: python -m benchmarks.readme -->\n", "<!-- end -->\n"


def table(runs: dict[str, results.Run]) -> str:
    """The table in Markdown, of the rows whose benchmarks were run."""
    rows = ["| what | result | target | command |", "|---|---|---|---|"]
    for what, result, target, _, benchmark in results.measured(runs):
        rows.append(f"| {what} | {result} | {target} | `B {benchmark}` |")
    dates = sorted({runs[row.benchmark].date for row in results.ROWS if row.benchmark in runs})
    machines = sorted({runs[row.benchmark].machine for row in results.ROWS if row.benchmark in runs})
    when = f"On {' and '.join(machines)}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}"
    text = f"{when}; each result and its comparison in the same run, the targets in the order of the results.\n"
    text += "`B` is `.venv/bin/python -m benchmarks`."
    return "\n".join((text, "", *rows, ""))


def updated(text: str, runs: dict[str, results.Run]) -> str:
    """The README with the table of these runs."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table(runs)}{END}{after}"


if __name__ == "__main__":
    README.write_text(updated(README.read_text(encoding="utf-8"), results.read()), encoding="utf-8")
