"""`penstock report`: a plan or a training run as one HTML file."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from penstock.cli.files import check_targets, read_record, write
from penstock.cli.options import AsJson
from penstock.cli.output import note, print_json
from penstock.cli.train_log import PLAN, RUN
from penstock.errors import FormatError

Source = Annotated[
    Path, Argument(metavar="SOURCE", help="JSON of a plan or run, or the directory that penstock train wrote.")
]
Out = Annotated[Path, Option(metavar="FILE", help="Write the report here.")]


def report(*, source: Source, out: Out = Path("report.html"), as_json: AsJson = False) -> None:
    """Write a report: one HTML file that needs no network.

    Predicted and measured timelines, memory, causes of the bubble, the stages, other candidates, and changes with their
    predicted gain. With --json, also prints the metrics of the report.
    """
    from penstock.api.report import contents_of
    from penstock.ir import Plan, Run
    from penstock.views import Report

    file = source
    if source.is_dir():
        files = [source / name for name in (RUN, PLAN) if (source / name).is_file()]
        if not files:
            hint = "the directory of penstock train, or the file of penstock plan --out FILE"
            raise FormatError("the directory has neither a run nor a plan", directory=source, hint=hint)
        file = files[0]
    check_targets((out,), source=file)
    record = read_record(file)
    if not isinstance(record, Plan | Run):
        hint = "JSON of a plan (penstock plan --out FILE) or of a training run (penstock train)"
        raise FormatError("only a plan or a run has a report", file=file, got=type(record).__name__, hint=hint)
    contents = contents_of(record)
    document = Report()(contents)
    write(out, document)
    if as_json:
        predicted, run = contents.plan.predicted, contents.run
        advice = [{"change": each.change, "seconds": each.seconds, "gain": each.gain} for each in contents.advice]
        print_json(
            {
                "file": str(out),
                "bytes": len(document.encode()),
                "plan": contents.digest,
                "predicted_seconds": predicted.makespan,
                "measured_seconds": run.step_seconds if run else None,
                "bubble": predicted.bubble,
                "lower_bound_seconds": predicted.lower_bound,
                "peak_bytes": max(predicted.peaks),
                "advice": advice,
            }
        )
    else:
        note(f"wrote {out} ({len(document.encode()) // 1000} KB): open it in a browser")
