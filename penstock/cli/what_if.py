"""`penstock what-if`: where the time of a recorded training goes, and what would be faster."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from penstock.cli.files import check_targets, write
from penstock.cli.options import AsJson
from penstock.cli.output import echo, note, print_json
from penstock.errors import PenstockError

Files = Annotated[
    list[Path],
    Argument(
        metavar="FILE...",
        help="run.json, a Chrome trace with ranges such as PP:2F0 (or one per rank), parquet, or a Megatron log.",
    ),
]
Microbatches = Annotated[
    int | None, Option(min=1, metavar="M", help="Microbatches per step, which a Megatron log does not have.")
]
Out = Annotated[Path | None, Option(metavar="FILE", help="Write a report with timelines as HTML.")]
Budget = Annotated[float, Option(min=0.0, metavar="SECONDS", help="How long to search for a better order.")]


def what_if(
    *, files: Files, microbatches: Microbatches = None, out: Out = None, budget: Budget = 1.0, as_json: AsJson = False
) -> None:
    """Explain a recorded training, and predict changes.

    Reads the passes of every rank from a trace of any framework. Prints the bubble by cause, which stage or replica is
    slow and what it costs, and the step with equal stages, with every other schedule and with more microbatches,
    beside a proven lower bound.
    """
    from penstock.planner import read_recording, what_if_document
    from penstock.planner import what_if as answer

    for file in files:
        if file.is_dir():
            hint = f"penstock what-if {file / 'run.json'}, or the trace files in it"
            raise PenstockError("FILE must be a file, got a directory", file=file, hint=hint)
        if not file.is_file():
            hint = "the run.json of penstock train, or a trace of torch.profiler"
            raise PenstockError("no such file", file=file, hint=hint)
        check_targets((out,), source=file)
    recording = read_recording(files, microbatches)
    found = answer(recording, budget)
    if as_json:
        print_json(found.to_dict())
    else:
        echo(str(found))
    if out is not None:
        write(out, what_if_document(recording, found))
        note(f"wrote {out}")
