"""Stored results of benchmarks (benchmarks/results.json), and the rows of README's table "Measured"."""

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
    """The results of one benchmark."""

    machine: str
    """such as "2 CPU cores" """
    seconds: float
    """duration of the last run, which may have measured some of the tables only"""
    tables: tuple[Table, ...]

    @property
    def failures(self) -> list[str]:
        """A text for every line that misses its target."""
        missed = [(table, line) for table in self.tables for line in table.lines if not line.passes]
        return [f"{table.title}: {' '.join(filter(None, line.row[:-1]))}" for table, line in missed]


def machine() -> str:
    """A description of this machine."""
    from penstock.launch import num_cores  # imports torch

    return f"{num_cores()} CPU cores"


def read(path: Path | None = None) -> dict[str, Run]:
    """Returns the runs in a file by the names of benchmarks; empty if there is no file."""
    path = path or PATH
    if not path.exists():
        return {}
    runs = {}
    for name, run in json.loads(path.read_text(encoding="utf-8")).items():
        tables = tuple(
            Table(each["title"], tuple(each["columns"]), [_line(**line) for line in each["lines"]], each["date"])
            for each in run["tables"]
        )
        runs[name] = Run(run["machine"], run["seconds"], tables)
    return runs


def write(name: str, run: Run, titles: Sequence[str]) -> None:
    """Writes the run of a benchmark to PATH and keeps the stored runs of other benchmarks.

    Stored tables of the same benchmark that this run did not measure are kept if `titles`, the titles of all its
    tables, still has them.
    """
    runs = read()
    tables = {table.title: table for table in (*(runs[name].tables if name in runs else ()), *run.tables)}
    runs[name] = replace(run, tables=tuple(tables[title] for title in titles if title in tables))
    document: dict[str, Any] = {}
    for each, stored in sorted(runs.items()):
        shown = [
            {
                "title": table.title,
                "date": table.date,
                "columns": table.columns,
                "lines": [_fields(line) for line in table.lines],
            }
            for table in stored.tables
        ]
        document[each] = {"machine": stored.machine, "seconds": round(stored.seconds, 1), "tables": shown}
    PATH.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _fields(line: Line) -> dict[str, Any]:
    # JSON has no infinity, so a missing target is stored as null.
    target = line.target if math.isfinite(line.target) else None
    return {"cells": line.cells, "value": float(line.value), "target": target, "at_least": line.at_least}


def _line(cells: list[str], value: float, target: float | None, at_least: bool) -> Line:
    infinite = -math.inf if at_least else math.inf
    return Line(tuple(cells), value, infinite if target is None else target, at_least)


@dataclass(frozen=True)
class Metric:
    """The range of a value over some lines of a table, as text."""

    table: str
    """selects the table: a part of its title"""
    text: str
    """the text, with {} in the place of the range"""
    form: str
    """the format specification of a value"""
    cells: tuple[str, ...] = ()
    """selects the lines: those that have one of these cells; empty: all"""
    column: str = ""
    """a column to read instead of the values of the lines; it has no target"""
    without: str = ""
    """excludes the lines that have this cell"""

    def lines(self, run: Run) -> list[Line]:
        """The selected lines of a run."""
        lines = [line for table in self._tables(run) for line in table.lines]
        lines = [line for line in lines if not self.without or self.without not in line.cells]
        return [line for line in lines if not self.cells or set(self.cells) & set(line.cells)]

    def show(self, run: Run) -> str:
        """The text with the range of a run."""
        lines = self.lines(run)
        if self.column:
            (table,) = self._tables(run)
            values = [float(line.cells[table.columns.index(self.column)]) for line in lines]
        else:
            values = [line.value for line in lines]
        least, largest = (format(value, self.form) for value in (min(values), max(values)))
        return self.text.replace("{}", least if least == largest else f"{least} to {largest}")

    def show_target(self, run: Run) -> str:
        """The text with the target."""
        lines = [line for line in self.lines(run) if math.isfinite(line.target)]
        targets = dict.fromkeys((">=" if line.at_least else "<=", line.target) for line in lines)
        is_share = self.form.endswith("%")
        shown = [f"{sign} {100 * target:g}%" if is_share else f"{sign} {target:g}" for sign, target in targets]
        return self.text.replace("{}", " or ".join(shown))

    def _tables(self, run: Run) -> list[Table]:
        return [table for table in run.tables if self.table in table.title]


@dataclass(frozen=True)
class ReadmeRow:
    """One row of README's table with its result."""

    what: str
    result: str
    target: str
    is_met: bool
    benchmark: str


@dataclass(frozen=True)
class Row:
    """One row of README's table: the benchmark and the metric that it shows."""

    what: str
    benchmark: str
    metric: Metric
    peer: Metric | None = None
    """the same metric of torch, shown beside the result; it has no target"""

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """All metrics of the row."""
        return (self.metric,) if self.peer is None else (self.metric, self.peer)

    def of(self, run: Run) -> ReadmeRow:
        """The row with the results of a run."""
        result = "; ".join(metric.show(run) for metric in self.metrics)
        is_met = all(line.passes for line in self.metric.lines(run))
        return ReadmeRow(self.what, result, self.metric.show_target(run), is_met, self.benchmark)


_WIDE = ("4 x 256", "16 x 256")
_SYNTHESISED = "8 ranks, 32 microbatches, memory of 1f1b"
_SLEEPING, _GPT = "sleeping stages, 8 ranks", "GPT with 8 layers"
ROWS = (
    Row(
        "measured step / simulated step, 8 ranks, passes of 80 ms",
        "runtime_sleep",
        Metric(_SLEEPING, "{}", ".3f", ("simulated",)),
    ),
    Row("the same step / torch's", "runtime_sleep", Metric(_SLEEPING, "{}", ".3f", ("torch",))),
    Row(
        "small GPT on two ranks, speed / one process's, 16 microbatches, 7 schedules",
        "runtime_compute",
        Metric(_GPT, "{}", ".2f", ("one process",)),
    ),
    Row("the same speed / torch's", "runtime_compute", Metric(_GPT, "{}", ".2f", ("torch",), without="mean")),
    Row("the same speed / torch's, mean of the schedules", "runtime_compute", Metric(_GPT, "{}", ".2f", ("mean",))),
    Row(
        "predicted against measured step, 20 random plans, median error",
        "prediction",
        Metric("20 random plans", "{}", ".1%", ("median",)),
    ),
    Row(
        'speed of the "auto" plan / torch\'s 1F1B with equal layers, head worth 4 layers',
        "prediction",
        Metric("a head worth 4", "{}", ".2f", ("1f1b",)),
    ),
    Row(
        "split backward (input + weight gradients) / full backward, d = 256",
        "backward",
        Metric("split backward of", "{}", ".2f", _WIDE),
        Metric("split backward of", "torch {}", ".2f", _WIDE, "torch's/B"),
    ),
    Row(
        "synthesised schedule / certified lower bound, 8 ranks x 32 microbatches",
        "synthesis",
        Metric(_SYNTHESISED, "{}", ".3f", ("loop x 1", "vee x 2"), without="CPU seconds"),
    ),
    Row("the same, interleaved", "synthesis", Metric(_SYNTHESISED, "{}", ".3f", ("loop x 2",), without="CPU seconds")),
    Row(
        "speed of building and lowering a schedule for 128 ranks / torch's",
        "planning",
        Metric("build + lower + verify, CPU seconds, 128 ranks", "{}", ".0f"),
    ),
    Row(
        "planning 8 billion parameters, without weights",
        "joint_plan",
        Metric("Llama-3 8B", "{} s", ".0f", ("8 billion, time",)),
    ),
    Row(
        "one of three ranks killed: time until all have stopped",
        "faults",
        Metric("ranks killed", "{} s", ".1f", ("all ended",)),
    ),
    Row("the same, until the next step", "faults", Metric("ranks killed", "{} s", ".1f", ("next step",))),
    Row(
        "runs with bit-identical losses, a rank killed at random or during a save",
        "faults",
        Metric("injected faults", "{} each", ".0f", ("killed at random", "killed in a save")),
    ),
    Row(
        "damaged checkpoints detected, of 2 and of 3 ranks",
        "faults",
        Metric("damaged checkpoints", "{} each", ".0f", ("damaged, 2 ranks", "damaged, 3 ranks")),
    ),
    Row(
        "step time lost to asynchronous saves, GPT on two ranks, Adam, a save every 10 steps",
        "saving",
        Metric("time lost to a save", "{}", ".1%", ("asynchronous",)),
    ),
    Row(
        "two replicas over 200 Mbit/s: step / simulated step",
        "overlap",
        Metric("two replicas", "{}", ".3f", ("simulated",)),
    ),
    Row(
        "the same step / longer of compute and communication",
        "overlap",
        Metric("two replicas", "{}", ".3f", ("longer",)),
    ),
)
"""the rows of README's table, in its order"""


def is_in_readme(benchmark: str, table: Table) -> bool:
    """Whether README shows results of this table."""
    return any(metric.table in table.title for row in ROWS if row.benchmark == benchmark for metric in row.metrics)


def readme_rows(runs: dict[str, Run]) -> list[ReadmeRow]:
    """The rows whose benchmarks were run; a benchmark that this machine cannot run has no lines, and no row."""
    return [
        row.of(runs[row.benchmark])
        for row in ROWS
        if row.benchmark in runs and all(metric.lines(runs[row.benchmark]) for metric in row.metrics)
    ]
