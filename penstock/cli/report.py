"""report: a plan or a training as one HTML file to look at and to hand to others."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from penstock.cli.files import check_targets, read_noun, write
from penstock.cli.options import AsJson
from penstock.cli.run_files import PLAN, RUN
from penstock.cli.screen import note, print_json
from penstock.errors import FormatError

if TYPE_CHECKING:
    from penstock.ir import Plan, Run
    from penstock.views import Contents

Source = Annotated[
    Path, Argument(metavar="SOURCE", help="The JSON of a plan or a run, or the directory that a training wrote.")
]
Out = Annotated[Path, Option(metavar="FILE", help="Write the report here.")]
NAMES = (RUN, PLAN)
"""what is looked for in a directory, in this order"""


def report(*, source: Source, out: Out = Path("report.html"), as_json: AsJson = False) -> None:
    """Write a report: one HTML file, without a network.

    Predicted and measured timelines, memory, where the bubble comes from, the stages, what else was looked at, and
    what to change next with its predicted gain. With --json the figures of the report are printed too.
    """
    from penstock.api.reporting import contents_of
    from penstock.views import Report

    file = _found(source)
    check_targets((out,), source=file)
    contents = contents_of(_read(file))
    document = Report()(contents)
    write(out, document)
    if as_json:
        print_json({"file": str(out), "bytes": len(document.encode()), **_figures(contents)})
    else:
        note(f"wrote {out} ({len(document.encode()) // 1000} KB): open it in a browser")


def _found(source: Path) -> Path:
    if not source.is_dir():
        return source
    found = next((source / name for name in NAMES if (source / name).is_file()), None)
    if found is None:
        hint = "the directory of penstock train, or the file of penstock plan --out FILE"
        raise FormatError("the directory holds neither a run nor a plan", directory=source, hint=hint)
    return found


def _read(file: Path) -> "Plan | Run":
    from penstock.ir import Plan, Run

    noun = read_noun(file)
    if not isinstance(noun, Plan | Run):
        hint = "the JSON of a plan (penstock plan --out FILE) or of a training (penstock train)"
        raise FormatError("only a plan or a run has a report", file=file, noun=type(noun).__name__, hint=hint)
    return noun


def _figures(contents: "Contents") -> dict[str, object]:
    seen, run = contents.plan.predicted, contents.run
    return {
        "plan": contents.digest,
        "predicted_seconds": seen.makespan,
        "measured_seconds": run.step_seconds if run else None,
        "bubble": seen.bubble,
        "lower_bound_seconds": seen.lower_bound,
        "peak_bytes": max(seen.peaks),
        "advice": [{"change": each.change, "seconds": each.seconds, "gain": each.gain} for each in contents.advice],
    }
