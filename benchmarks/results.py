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

    date: str
    """when the last table was measured"""
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
            Table(each["title"], tuple(each["columns"]), [_line(**line) for line in each["lines"]])
            for each in run["tables"]
        )
        runs[name] = Run(run["date"], run["machine"], run["seconds"], tables)
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
        """The text with the target, and "(missed)" if a value misses it; empty without a target."""
        lines = [] if self.column else [line for line in self.lines(run) if math.isfinite(line.target)]
        targets = dict.fromkeys((">=" if line.at_least else "<=", line.target) for line in lines)
        is_share = self.form.endswith("%")
        shown = [f"{sign} {100 * target:g}%" if is_share else f"{sign} {target:g}" for sign, target in targets]
        missed = "" if all(line.passes for line in lines) else " (missed)"
        return self.text.replace("{}", " or ".join(shown)) + missed if shown else ""

    def _tables(self, run: Run) -> list[Table]:
        return [table for table in run.tables if self.table in table.title]


@dataclass(frozen=True)
class ReadmeRow:
    """One row of README's table with its results."""

    what: str
    result: str
    target: str
    """the targets in the order of the results"""
    status: str
    """PASS or FAIL"""
    benchmark: str


@dataclass(frozen=True)
class Row:
    """One row of README's table: the benchmark and the metrics that it shows."""

    what: str
    benchmark: str
    metrics: tuple[Metric, ...]

    def of(self, run: Run) -> ReadmeRow:
        """The row with the results of a run."""
        lines = [line for metric in self.metrics if not metric.column for line in metric.lines(run)]
        result = "; ".join(metric.show(run) for metric in self.metrics)
        target = "; ".join(filter(None, (metric.show_target(run) for metric in self.metrics)))
        status = "PASS" if all(line.passes for line in lines) else "FAIL"
        return ReadmeRow(self.what, result, target, status, self.benchmark)


_WIDE = ("4 x 256", "16 x 256")
_SYNTHESISED = "8 ranks, 32 microbatches, memory of 1f1b"
ROWS = (
    Row(
        "measured step / simulated step, 8 ranks, 80 ms passes",
        "runtime_sleep",
        (
            Metric("sleeping stages, 8 ranks", "{}", ".3f", ("simulated",)),
            Metric("sleeping stages, 8 ranks", "{} of torch's time", ".3f", ("torch",)),
        ),
    ),
    Row(
        "small GPT on two ranks against one process, 16 microbatches",
        "runtime_compute",
        (
            Metric("GPT with 8 layers", "{} times as fast", ".2f", ("one process",)),
            Metric("GPT with 8 layers", "{} times as fast as torch", ".2f", ("torch",), without="mean"),
            Metric("GPT with 8 layers", "in the mean {}", ".2f", ("mean",)),
        ),
    ),
    Row(
        "predicted against measured step, 20 random plans",
        "prediction",
        (Metric("20 random plans", "median error {}", ".1%", ("median",)),),
    ),
    Row(
        '"auto" plan against torch\'s 1F1B with equal layers, head worth 4 layers',
        "prediction",
        (Metric("a head worth 4", "{} times as fast", ".2f", ("1f1b",)),),
    ),
    Row(
        "split backward (input + weight gradients) / full backward, d = 256",
        "backward",
        (
            Metric("split backward of", "{}", ".2f", _WIDE),
            Metric("split backward of", "torch {}", ".2f", _WIDE, "torch's/B"),
        ),
    ),
    Row(
        "synthesised schedule / certified lower bound, 8 ranks x 32 microbatches",
        "synthesis",
        (
            Metric(_SYNTHESISED, "{}", ".3f", ("loop x 1", "vee x 2"), without="CPU seconds"),
            Metric(_SYNTHESISED, "interleaved {}", ".3f", ("loop x 2",), without="CPU seconds"),
        ),
    ),
    Row(
        "building and lowering a schedule for 128 ranks",
        "planning",
        (Metric("build + lower + verify, CPU seconds, 128 ranks", "{} times as fast as torch", ".0f"),),
    ),
    Row(
        "planning 8 billion parameters on a laptop, without weights",
        "joint_plan",
        (
            Metric("Llama-3 8B", "{} s", ".0f", ("8 billion, time",)),
            Metric("Llama-3 8B", "{} GB", ".1f", ("8 billion, peak",)),
        ),
    ),
    Row(
        "one of three ranks killed: time until all have stopped; until the next step",
        "faults",
        (
            Metric("ranks killed", "{} s", ".1f", ("all ended",)),
            Metric("ranks killed", "{} s", ".1f", ("next step",)),
        ),
    ),
    Row(
        "losses bit-identical after a rank was killed at random; killed during a save; damaged checkpoints detected, "
        "for 2 and 3 ranks",
        "faults",
        (
            Metric("injected faults", "{} runs", ".0f", ("killed at random",)),
            Metric("injected faults", "{} runs", ".0f", ("killed in a save",)),
            Metric("damaged checkpoints", "{} each", ".0f", ("damaged, 2 ranks", "damaged, 3 ranks")),
        ),
    ),
    Row(
        "step time lost to asynchronous saves, a small GPT on two ranks, Adam, a save every 10 steps",
        "saving",
        (Metric("time lost to a save", "{}", ".1%", ("asynchronous",)),),
    ),
    Row(
        "two replicas over 200 Mbit/s: step / simulated step; step / longer of compute and communication",
        "overlap",
        (
            Metric("two replicas", "{}", ".3f", ("simulated",)),
            Metric("two replicas", "{}", ".3f", ("longer",)),
        ),
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
