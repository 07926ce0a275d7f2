"""Voice: what the first rank of a training says and writes down, step by step."""

import json
from typing import TYPE_CHECKING, TextIO

import typer

from penstock.cli.run_files import Diary
from penstock.cli.screen import note
from penstock.cli.step_line import step_line, step_plain

if TYPE_CHECKING:
    from penstock.api.loop import StepReport
    from penstock.cli.training_job import Job
    from penstock.ir import Plan, StepMetrics


class Voice:
    """Tells every step in a line, and keeps its figures where they outlive the run."""

    def __init__(self, plan: "Plan", job: "Job", out: TextIO) -> None:
        self._seconds, self._as_json, self._out = plan.predicted.makespan, job.as_json, out
        self._model = job.model
        self._diary = None if job.out is None else Diary(job.out)
        self._written: int | None = None
        """the last step in the diary"""

    def __call__(self, report: "StepReport") -> None:
        """Tell a step that was taken."""
        for remark in () if self._as_json else report.remarks:
            note(remark.replace(" MODEL ", f" {self._model} "))  # in what could be typed next
        self.write_down(report.figures)
        told = step_plain(report, self._seconds) if self._as_json else None
        line = step_line(report, self._seconds) if told is None else json.dumps(told, allow_nan=False)
        typer.echo(line, file=self._out)

    def write_down(self, figures: "StepMetrics") -> None:
        """Put a step into the diary, once; a disk that is full is no reason to stop."""
        if self._diary is None or figures.step == self._written:
            return
        self._written = figures.step
        try:
            self._diary.add(figures)
        except OSError as error:
            self._diary = None
            note(f"STEPS ARE NOT WRITTEN DOWN ANY MORE, training goes on: {error}")
