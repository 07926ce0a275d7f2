"""Results of benchmarks as JSON, and the rows of README's table "Measured" that show them."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.table import Line, Table

PATH = Path(__file__).with_name("results.json")


@dataclass(frozen=True)
class Run:
    """One benchmark that was run: its tables, with lists of lines."""

    date: str
    """of the last table that was run"""
    machine: str
    """in plain words, as "2 CPU cores" """
    seconds: float
    """how long the tables took that were run last"""
    tables: tuple[Table, ...]

    @property
    def failures(self) -> list[str]:
        """The lines that miss their targets."""
        missed = [(table, line) for table in self.tables for line in table.lines if not line.passes]
        return [f"{table.title}: {' '.join(filter(None, line.row[:-1]))}" for table, line in missed]


def machine() -> str:
    """The class of this machine."""
    from penstock.launch import num_cores  # imports torch, which the table of README does not need

    return f"{num_cores()} CPU cores"


def read(path: Path | None = None) -> dict[str, Run]:
    """The runs of a file by the names of benchmarks; none if there is no file."""
    path = path or PATH
    if not path.exists():
        return {}
    runs = {}
    for name, run in json.loads(path.read_text(encoding="utf-8")).items():
        tables = tuple(
            Table(each["title"], tuple(each["columns"]), [_line(**line) for line in each["lines"]])
            for each in run["tables"]
        )
        runs[name] = Run(run["date"], run["machine"], run["seconds"], tables)
    return runs


def write(name: str, run: Run, titles: Sequence[str]) -> None:
    """Write the run of a benchmark to PATH.

    Other benchmarks are kept, and other tables of this one, if they are among `titles`, those that it has now.
    """
    runs = read()
    tables = {table.title: table for table in (*(runs[name].tables if name in runs else ()), *run.tables)}
    runs[name] = replace(run, tables=tuple(tables[title] for title in titles if title in tables))
    document: dict[str, Any] = {}
    for each, stored in sorted(runs.items()):
        shown = [
            {"title": table.title, "columns": table.columns, "lines": [_fields(line) for line in table.lines]}
            for table in stored.tables
        ]
        document[each] = {
            "date": stored.date,
            "machine": stored.machine,
            "seconds": round(stored.seconds, 1),
            "tables": shown,
        }
    PATH.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _fields(line: Line) -> dict[str, Any]:
    # JSON has no infinity: a line without a target has none.
    target = line.target if math.isfinite(line.target) else None
    return {"cells": line.cells, "value": float(line.value), "target": target, "at_least": line.at_least}


def _line(cells: list[str], value: float, target: float | None, at_least: bool) -> Line:
    infinite = -math.inf if at_least else math.inf
    return Line(tuple(cells), value, infinite if target is None else target, at_least)


@dataclass(frozen=True)
class Figure:
    """Figures of some lines of one table: their values, or their cells in a column."""

    table: str
    """what the title of the table contains"""
    text: str
    """around the smallest and the largest of them, in the place of {}"""
    form: str
    """the format of one figure"""
    cells: tuple[str, ...] = ()
    """the lines that have one of these cells; empty: all"""
    column: str = ""
    """the column of the figures, which have no target; "": the values of the lines"""
    without: str = ""
    """lines that have this cell are left out"""

    def lines(self, run: Run) -> list[Line]:
        """The lines of the run that it shows."""
        found = [line for table in self._tables(run) for line in table.lines]
        found = [line for line in found if not self.without or self.without not in line.cells]
        return [line for line in found if not self.cells or set(self.cells) & set(line.cells)]

    def show(self, run: Run) -> str:
        """The text with the figures of the run."""
        lines = self.lines(run)
        if self.column:
            (table,) = self._tables(run)
            figures = [float(line.cells[table.columns.index(self.column)]) for line in lines]
        else:
            figures = [line.value for line in lines]
        least, largest = (format(each, self.form) for each in (min(figures), max(figures)))
        return self.text.replace("{}", least if least == largest else f"{least} to {largest}")

    def show_target(self, run: Run) -> str:
        """The target in the unit of the figures, and whether a figure misses it; empty if they have none."""
        lines = [] if self.column else [line for line in self.lines(run) if math.isfinite(line.target)]
        targets = dict.fromkeys((">=" if line.at_least else "<=", line.target) for line in lines)
        is_share = self.form.endswith("%")
        shown = [f"{sign} {100 * target:g}%" if is_share else f"{sign} {target:g}" for sign, target in targets]
        missed = "" if all(line.passes for line in lines) else " (missed)"
        return self.text.replace("{}", " or ".join(shown)) + missed if shown else ""

    def _tables(self, run: Run) -> list[Table]:
        return [table for table in run.tables if self.table in table.title]


@dataclass(frozen=True)
class Row:
    """One row of README's table."""

    what: str
    benchmark: str
    figures: tuple[Figure, ...]

    def cells(self, run: Run) -> tuple[str, str, str]:
        """Results, their targets in the same order, and verdict."""
        lines = [line for figure in self.figures if not figure.column for line in figure.lines(run)]
        targets = filter(None, (figure.show_target(run) for figure in self.figures))
        verdict = "PASS" if all(line.passes for line in lines) else "FAIL"
        return "; ".join(figure.show(run) for figure in self.figures), "; ".join(targets), verdict


_WIDE = ("4 x 256", "16 x 256")
_SYNTHESISED = "8 ranks, 32 microbatches, memory of 1f1b"
ROWS = (
    Row(
        "measured step / simulated step, 8 ranks, 80 ms passes",
        "runtime_sleep",
        (
            Figure("sleeping stages, 8 ranks", "{}", ".3f", ("simulated",)),
            Figure("sleeping stages, 8 ranks", "{} of torch's time", ".3f", ("torch",)),
        ),
    ),
    Row(
        "small GPT on two ranks against one process, 16 microbatches",
        "runtime_compute",
        (
            Figure("a GPT of", "{} times as fast", ".2f", ("one process",)),
            Figure("a GPT of", "{} times as fast as torch", ".2f", ("torch",), without="mean"),
            Figure("a GPT of", "in the mean {}", ".2f", ("mean",)),
        ),
    ),
    Row(
        "predicted against measured step, 20 random plans",
        "prediction",
        (Figure("20 random plans", "median error {}", ".1%", ("median",)),),
    ),
    Row(
        '"auto" plan against torch\'s 1F1B with equal layers, head worth 4 layers',
        "prediction",
        (Figure("a head worth 4", "{} times as fast", ".2f", ("1f1b",)),),
    ),
    Row(
        "split backward (input + weight gradients) / full backward, d = 256",
        "backward",
        (
            Figure("split backward of", "{}", ".2f", _WIDE),
            Figure("split backward of", "torch {}", ".2f", _WIDE, "torch's/B"),
        ),
    ),
    Row(
        "synthesised schedule / certified lower bound, 8 ranks x 32 microbatches",
        "synthesis",
        (
            Figure(_SYNTHESISED, "{}", ".3f", ("loop x 1", "vee x 2"), without="CPU seconds"),
            Figure(_SYNTHESISED, "interleaved {}", ".3f", ("loop x 2",), without="CPU seconds"),
        ),
    ),
    Row(
        "building and lowering a schedule for 128 ranks",
        "planning",
        (Figure("build + lower + verify, CPU seconds, 128 ranks", "{} times as fast as torch", ".0f"),),
    ),
    Row(
        "planning 8 billion parameters on a laptop, without weights",
        "joint_plan",
        (
            Figure("Llama-3 8B", "{} s", ".0f", ("8 billion, time",)),
            Figure("Llama-3 8B", "{} GB", ".1f", ("8 billion, peak",)),
        ),
    ),
    Row(
        "one of three ranks killed: time until all have stopped; until the next step",
        "faults",
        (
            Figure("is killed, seconds", "{} s", ".1f", ("all ended",)),
            Figure("is killed, seconds", "{} s", ".1f", ("next step",)),
        ),
    ),
    Row(
        "every loss bit-identical after a rank is killed at random; in a save; damaged checkpoints detected, of 2 and "
        "3 ranks",
        "faults",
        (
            Figure("injected faults", "{} runs", ".0f", ("killed at random",)),
            Figure("injected faults", "{} runs", ".0f", ("killed in a save",)),
            Figure("checkpoints that are damaged", "{} each", ".0f", ("damaged, 2 ranks", "damaged, 3 ranks")),
        ),
    ),
    Row(
        "step time lost to asynchronous saves, a small GPT on two ranks, Adam, a save every 10 steps",
        "saving",
        (Figure("share of the time", "{}", ".1%", ("asynchronous",)),),
    ),
    Row(
        "two replicas over 200 Mbit/s: step / simulated step; step / longer of compute and communication",
        "overlap",
        (
            Figure("two replicas", "{}", ".3f", ("simulated",)),
            Figure("two replicas", "{}", ".3f", ("longer",)),
        ),
    ),
)
"""the rows of README's table, in its order"""


def is_in_readme(benchmark: str, table: Table) -> bool:
    """Whether README shows figures of this table."""
    return any(figure.table in table.title for row in ROWS if row.benchmark == benchmark for figure in row.figures)


def measured(runs: dict[str, Run]) -> list[tuple[str, str, str, str, str]]:
    """What, result, target, verdict and benchmark of the rows that were run; not every machine can run all."""
    rows = []
    for row in ROWS:
        run = runs.get(row.benchmark)
        if run is not None and all(figure.lines(run) for figure in row.figures):
            rows.append((row.what, *row.cells(run), row.benchmark))
    return rows
