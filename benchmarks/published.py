"""published: predicted iterations compared with published measurements of GPU clusters.

There are three kinds of prediction, with a table each:

- given pass times: a pipeline is simulated with the measured seconds of its passes
- ahead: the first five steps predict all later ones
- from configuration: `literature.py`, with one calibrated rate per system

Traces and times are read from the directory PENSTOCK_PUBLISHED (default: shared/data/published beside the repository)
and left out without it. `benchmarks/documents.py` writes all rows into docs/accuracy.md.
"""

import csv
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from benchmarks.literature import PAPERS, Setting
from benchmarks.table import Line, Table
from penstock.ir import StageCosts
from penstock.passes import lower
from penstock.planner import RecordedTraining, read_recording
from penstock.schedules import build
from penstock.simulate import simulate

DATA = Path(os.environ.get("PENSTOCK_PUBLISHED", Path(__file__).parents[2] / "shared/data/published"))
_FIRST = 5
"""number of steps that predict the later ones"""
_GIVEN, _AHEAD, _CONFIGURED = 0.03, 0.05, 0.05
"""maximum mean error of each kind of prediction"""


class Row(NamedTuple):
    """One measurement and its prediction, in seconds."""

    source: str
    inputs: str
    name: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative error; negative if the prediction is too short."""
        return self.predicted / self.measured - 1


def tables() -> tuple[Table, ...]:
    """All tables of this benchmark."""
    columns = ("measurements", "mean", "worst", "rows")
    return (
        Table("published: given the measured seconds of every pass", columns, _lines(given(), _GIVEN)),
        Table(f"published: ahead, from the first {_FIRST} steps", columns, _lines(ahead(), _AHEAD)),
        Table("published: from configuration, one calibration per system", columns, _lines(configured(), _CONFIGURED)),
    )


def _lines(rows: Iterator[Row], target: float) -> Iterator[Line]:
    by_source: dict[str, list[float]] = {}
    for row in rows:
        by_source.setdefault(row.source, []).append(abs(row.error))
    for source, errors in by_source.items():
        mean = fmean(errors)
        cells = (source, f"{mean:.2%}", f"{max(errors):.2%}", str(len(errors)))
        yield Line(cells, mean, target, at_least=False)


def recordings() -> Iterator[tuple[str, RecordedTraining]]:
    """The published traces by name; none without pyarrow or the data."""
    if find_spec("pyarrow") is not None:
        for path in sorted(DATA.glob("trace-*.parquet")):
            yield path.stem.removeprefix("trace-"), read_recording([path])


def given() -> Iterator[Row]:
    """Pipelines simulated with measured pass times: per microbatch from traces, per stage from the CSV files."""
    for name, recording in recordings():
        for each in recording.steps:
            predicted = recording.simulated[each.step, each.replica]
            where = f"step {each.step}, replica {each.replica}"
            yield Row(f"job {name}", "seconds of every pass, median message", where, predicted, each.seconds)
    for path in sorted(DATA.glob("*.csv")):
        with path.open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                forward, backward = ([1e-6 * float(v) for v in row[f"{k}_us"].split()] for k in ("forward", "backward"))
                half = [each / 2 for each in backward]
                program = lower(build("1f1b", len(forward), 128))
                seconds = simulate(program, StageCosts(forward, half, half)).makespan
                yield Row(
                    "Megatron, 8 A100",
                    "mean pass of each stage",
                    row["name"],
                    seconds,
                    1e-3 * float(row["iteration_ms"]),
                )


def ahead() -> Iterator[Row]:
    """The mean step of all replicas, predicted from the simulation of the first steps."""
    for name, recording in recordings():
        steps = list(recording.by_step)
        first, later = steps[:_FIRST], steps[_FIRST:]
        expected = fmean(recording.simulated[step, each.replica] for step in first for each in recording.by_step[step])
        for step in later:
            measured = fmean(each.seconds for each in recording.by_step[step])
            yield Row(f"job {name}", f"passes of the first {_FIRST} steps", f"step {step}", expected, measured)


def configured() -> Iterator[Row]:
    """Iterations predicted from model, parallelism and batch; the middle row of each system calibrates its rate."""
    for source, settings in PAPERS.items():
        yield from predicted_from(source, settings[len(settings) // 2], settings)


def predicted_from(source: str, known: Setting, settings: list[Setting]) -> Iterator[Row]:
    """Predicts the measurements of a system with the rate of one of them."""
    inputs = f"{known.rate / 1e12:.0f} TFLOP/s from {known.name}"
    for each in settings:
        if each is not known:
            yield Row(source, inputs, each.name, each.predicted(known.rate), each.seconds)


def choices(source: str) -> list[float]:
    """The sorted mean errors of a system, one for every choice of the row that calibrates its rate."""
    settings = PAPERS[source]
    found = ([abs(row.error) for row in predicted_from(source, known, settings)] for known in settings)
    return sorted(map(fmean, found))


def table_of(rows: Iterator[Row]) -> str:
    """A Markdown table with a row for each job of the traces and for each other measurement."""
    lines = [
        "| source | inputs | case | predicted | measured | error |",
        "|---|---|---|---|---|---|",
    ]
    jobs: dict[str, list[Row]] = {}
    for row in rows:
        jobs.setdefault(row.source, []).append(row)
    for source, found in jobs.items():
        if source.startswith("job"):
            errors = [abs(row.error) for row in found]
            means = (fmean(getattr(row, name) for row in found) for name in ("predicted", "measured"))
            values = " | ".join(f"{mean:.3f} s" for mean in means)
            spread = f"{fmean(errors):.2%} mean, {max(errors):.2%} worst"
            lines.append(f"| {source} | {found[0].inputs} | all {len(found)} | {values} | {spread} |")
            continue
        for row in found:
            values = f"{row.predicted:.3f} s | {row.measured:.3f} s | {row.error:+.1%}"
            lines.append(f"| {source} | {row.inputs} | {row.name} | {values} |")
    return "\n".join(lines)


def summary() -> str:
    """A Markdown table with the mean and the largest error of every source."""
    lines = ["| kind | measurements | mean error | worst | mean with any row as calibration |", "|---|---|---|---|---|"]
    kinds = {"given pass times": given(), "ahead": ahead(), "from configuration": configured()}
    for kind, rows in kinds.items():
        by_source: dict[str, list[float]] = {}
        for row in rows:
            by_source.setdefault(row.source, []).append(abs(row.error))
        for source, errors in by_source.items():
            found = choices(source) if source in PAPERS else []
            met = sum(mean <= _CONFIGURED for mean in found)
            others = f"{found[0]:.1%} to {found[-1]:.1%}, {met} of {len(found)} rows meet the goal" if found else ""
            mean = f"{fmean(errors):.2%} | {max(errors):.2%}"
            lines.append(f"| {kind} | {source}, {len(errors)} rows | {mean} | {others} |")
    return "\n".join(lines)
