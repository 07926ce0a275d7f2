"""The output of a training run: one line per step, and the files in its --out directory."""

import json
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from penstock.cli.files import write
from penstock.cli.output import echo, note
from penstock.errors import FormatError, PenstockError

if TYPE_CHECKING:
    from penstock.api.train_loop import StepReport
    from penstock.ir import Plan, Run, StepMetrics

PLAN, RUN, TRACE, REPORT = "plan.json", "run.json", "trace.json.gz", "report.html"
STEPS = "steps.jsonl"  # the metrics of every step, one line each, written while training
STATUS = "status"  # the directory of the ranks' status files


def make_directory(directory: Path) -> None:
    """Create the directory of a run."""
    if directory.exists() and not directory.is_dir():
        raise PenstockError("--out must be a directory, got a file", directory=directory, hint="another name")
    directory.mkdir(parents=True, exist_ok=True)


def write_run(run: "Run", directory: Path) -> list[Path]:
    """Write plan, run, trace and report; returns their paths."""
    import penstock
    from penstock.api.report import report
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


def with_earlier_steps(run: "Run", directory: Path) -> "Run":
    """The run with the steps of earlier attempts; a run that had nothing left to do is the earlier one."""
    from penstock.ir import Run, load_record

    written = read_steps(directory)
    if run.steps:
        earlier = [metrics for metrics in written if metrics.step < run.steps[0].step]
        return replace(run, steps=(*earlier, *run.steps))
    try:
        known = load_record(directory / RUN, Run)
    except FormatError:
        known = None
    return known if known is not None and known.steps == written else replace(run, steps=written)


def missing_steps(run: "Run") -> list[tuple[int, int]]:
    """The first and last step of each gap in a run: steps of earlier attempts that could not be written."""
    numbers = [metrics.step for metrics in run.steps]
    return [(before + 1, after - 1) for before, after in pairwise(numbers) if after > before + 1]


def read_steps(directory: Path) -> "tuple[StepMetrics, ...]":
    """The steps that a run has written to its --out directory so far."""
    from penstock.api.step_logs import JsonLines

    return JsonLines(directory / STEPS).read()


class TrainLog:
    """Prints every step on the first rank."""

    def __init__(self, plan: "Plan", model: str, as_json: bool, out: TextIO) -> None:
        self._predicted_seconds, self._model = plan.predicted.makespan, model
        self._as_json, self._out = as_json, out

    def __call__(self, report: "StepReport") -> None:
        if self._as_json:
            line = json.dumps(step_dict(report, self._predicted_seconds), allow_nan=False)
        else:
            for text in report.notes:
                note(text.replace(" MODEL ", f" {self._model} "))  # in commands that the user could type
            line = step_line(report, self._predicted_seconds)
        echo(line, file=self._out)


def step_line(report: "StepReport", predicted_seconds: float) -> str:
    """Loss, gradient norm, time against the prediction, throughput, slowest stage, memory, and time left."""
    from penstock.ir import bytes_text, seconds_text

    metrics = report.metrics
    number = f"{metrics.step + 1}/{report.num_steps}" if report.num_steps else str(metrics.step + 1)
    rate = (report.tokens or metrics.samples) / max(metrics.seconds, 1e-9)
    parts = [
        f"step {number}",
        f"loss {number_text(metrics.loss)}",
        *([] if metrics.eval_loss is None else [f"eval loss {number_text(metrics.eval_loss)}"]),
        f"norm {number_text(metrics.grad_norm)}",
        f"{seconds_text(metrics.seconds)} (pipeline {report.pipeline_seconds / predicted_seconds:.2f} of predicted)",
        f"{rate:,.0f} {'tokens' if report.tokens else 'samples'}/s",
        f"slowest stage {report.slowest[0]} ({seconds_text(report.slowest[1])})",
        f"memory {bytes_text(report.memory)}",
    ]
    if report.skipped:
        parts.append(f"SKIPPED: {report.skipped}")
    if report.eta_seconds is not None:
        minutes, seconds = divmod(round(report.eta_seconds), 60)
        hours, minutes = divmod(minutes, 60)
        parts.append(f"eta {hours}:{minutes:02}:{seconds:02}" if hours else f"eta {minutes}:{seconds:02}")
    return "  ".join(parts)


def step_dict(report: "StepReport", predicted_seconds: float) -> dict[str, Any]:
    """A step as JSON values."""
    return {
        **asdict(report.metrics),
        "steps": report.num_steps,
        "pipeline_seconds": report.pipeline_seconds,
        "predicted_seconds": predicted_seconds,
        "tokens": report.tokens,
        "slowest_stage": report.slowest[0],
        "slowest_stage_seconds": report.slowest[1],
        "memory_bytes": report.memory,
        "eta_seconds": report.eta_seconds,
        "skipped": report.skipped,
        "notes": list(report.notes),
    }


def number_text(value: float | None) -> str:
    """A loss or a norm."""
    return "not finite" if value is None else f"{value:.4f}"
