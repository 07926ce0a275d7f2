"""The directory of a run: its plan, what it came to, its trace and its report, each written whole."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.files import write
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.ir import Run, StepMetrics

PLAN, RUN, TRACE, REPORT = "plan.json", "run.json", "trace.json.gz", "report.html"
STEPS = "steps.jsonl"
"""the figures of every step, written as it ends"""
BOARD = "board"
"""what the ranks note while they run"""


def check_directory(directory: Path) -> None:
    """Make the directory, before work is spent on what goes there."""
    if directory.exists() and not directory.is_dir():
        raise PenstockError("a file stands where the directory should go", directory=directory, hint="another name")
    directory.mkdir(parents=True, exist_ok=True)


def write_run(run: "Run", directory: Path) -> list[Path]:
    """The files of a run, predicted and measured one above the other where a step was recorded."""
    import penstock
    from penstock.api.reporting import report
    from penstock.ir import to_json
    from penstock.views import Chrome

    traces = {"predicted": penstock.simulate(run.plan)}
    if run.trace is not None:
        traces["measured"] = run.trace
    documents = {
        PLAN: to_json(run.plan),
        RUN: to_json(run),
        TRACE: Chrome()(traces),
        REPORT: report(run),
    }
    for name, document in documents.items():
        write(directory / name, document)
    return [directory / name for name in documents]


class Diary:
    """The figures of a run's steps, one line each, which also outlive a run that is killed."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / STEPS
        self._has_begun = False

    def add(self, figures: "StepMetrics") -> None:
        """One more step; those after it were of an earlier life, which went further before it broke."""
        if not self._has_begun:
            earlier = [known for known in self.steps() if known.step < figures.step]
            write(self._path, "".join(map(_line, earlier)))
            self._has_begun = True
        with self._path.open("a") as file:
            file.write(_line(figures))

    def steps(self) -> "tuple[StepMetrics, ...]":
        """What was written so far; a line that was cut off does not count."""
        from penstock.ir import StepMetrics

        try:
            lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return ()
        found: list[StepMetrics] = []
        for line in lines:
            try:
                found.append(StepMetrics(**json.loads(line)))
            except (ValueError, TypeError):
                break
        return tuple(found)

    def completed(self, run: "Run") -> "Run":
        """A run with the steps of all its lives; one that had nothing left to do is as it was written before."""
        written = self.steps()
        if not run.steps:
            known = _known(self._path.with_name(RUN))
            return known if known is not None and known.steps == written else replace(run, steps=written)
        earlier = [figures for figures in written if figures.step < run.steps[0].step]
        return replace(run, steps=(*earlier, *run.steps))


def _known(path: Path) -> "Run | None":
    """The run of a file, if it is one."""
    from penstock.errors import FormatError
    from penstock.ir import Run, load_record

    try:
        return load_record(path, Run)
    except FormatError:
        return None


def _line(figures: "StepMetrics") -> str:
    return json.dumps(asdict(figures), allow_nan=False) + "\n"
