"""`penstock trace`: write a Chrome trace of any order."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from penstock.cli.files import check_targets, read_record, write
from penstock.cli.options import AsJson, Given, Times
from penstock.cli.output import note, print_json
from penstock.cli.simulate import prove, simulate_program
from penstock.errors import FormatError, PenstockError

File = Annotated[Path, Argument(metavar="FILE", help="CSV, text or JSON of a schedule, program, trace, plan or run.")]
Target = Annotated[Path, Argument(metavar="TARGET", help="The file to write; compressed if the name ends in .gz.")]
Flows = Annotated[bool, Option("--flows", help="Draw an arrow from the producer of each message to its consumer.")]


def trace(
    *, file: File, target: Target, times: Times, given: Given, flows: Flows = False, as_json: AsJson = False
) -> None:
    """Write a Chrome trace, for a trace viewer.

    Open it in ui.perfetto.dev or chrome://tracing. Orders are proven and simulated first, with the given seconds; a
    plan has its own costs, and a recorded trace is written as it is.
    """
    import penstock
    from penstock.ir import Run
    from penstock.views import Chrome

    check_targets((target,), source=file)
    record = read_record(file)
    if (typed := given.of(Times)) and isinstance(record, Run | penstock.Plan | penstock.Trace):
        hint = f"penstock trace {file} {target}"
        problem = f"costs and links must not be given: the {type(record).__name__.lower()} has them"
        raise PenstockError(problem, file=file, options=", ".join(typed), hint=hint)
    if isinstance(record, Run):
        record = record.trace or record.plan
    if isinstance(record, penstock.Plan):
        record = penstock.simulate(record)
    if isinstance(record, penstock.Schedule | penstock.Program):
        prove(record)
    if isinstance(record, penstock.Schedule):
        record = penstock.lower(record)
    if isinstance(record, penstock.Program):
        record = simulate_program(record, times)
    if not isinstance(record, penstock.Trace):
        hint = "a schedule, program, trace, plan or run"
        raise FormatError("the file has no order to trace", file=file, got=type(record).__name__, hint=hint)
    write(target, Chrome(flows=flows)(record))
    if as_json:
        print_json({"file": str(target), "makespan": record.makespan, "bubble": record.bubble})
    else:
        note(f"wrote {target}: open it in ui.perfetto.dev")
