"""trace: orders from a file, as a Chrome trace to zoom and measure in."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from penstock.cli.files import check_targets, read_noun, write
from penstock.cli.options import AsJson, Times
from penstock.cli.runs import prove, timed
from penstock.cli.screen import note, print_json
from penstock.errors import FormatError

File = Annotated[
    Path, Argument(metavar="FILE", help="The CSV, text or JSON of a schedule, program, trace, plan or run.")
]
Target = Annotated[Path, Argument(metavar="TARGET", help="The file to write; compressed if the name ends in .gz.")]
Flows = Annotated[bool, Option("--flows", help="Draw an arrow from the maker of each message to its user.")]


def trace(*, file: File, target: Target, times: Times, flows: Flows = False, as_json: AsJson = False) -> None:
    """Write a Chrome trace, to zoom and measure in.

    It opens in ui.perfetto.dev and chrome://tracing. Orders are proven and simulated first, with the given seconds; a
    plan brings its own, and a trace is written as it is, also that of a run.
    """
    import penstock
    from penstock.ir import Run
    from penstock.views import Chrome

    check_targets((target,), source=file)
    noun = read_noun(file)
    if isinstance(noun, Run):
        noun = noun.trace or noun.plan
    if isinstance(noun, penstock.Plan):
        noun = penstock.simulate(noun)
    if isinstance(noun, penstock.Schedule | penstock.Program):
        prove(noun)
    if isinstance(noun, penstock.Schedule):
        noun = penstock.lower(noun)
    if isinstance(noun, penstock.Program):
        noun = timed(noun, times)
    if not isinstance(noun, penstock.Trace):
        raise FormatError(
            "nothing that runs", file=file, noun=type(noun).__name__, hint="a schedule, program, trace, plan or run"
        )
    write(target, Chrome(flows=flows)(noun))
    if as_json:
        print_json({"file": str(target), "makespan": noun.makespan, "bubble": noun.bubble})
    else:
        note(f"wrote {target}: open it in ui.perfetto.dev")
