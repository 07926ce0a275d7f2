"""`penstock explain`: why a plan cuts and orders a model as it does."""

from pathlib import Path
from typing import Annotated

from typer import Argument

from penstock.cli.files import read_record
from penstock.cli.models import HF
from penstock.cli.options import AsJson, Example, Given
from penstock.cli.output import echo, print_json
from penstock.cli.plan import Machine, PlanFlags, StateFlags, make_plan
from penstock.errors import FormatError, PlanError

File = Annotated[str, Argument(metavar="FILE", help="JSON file of a plan, or a MODEL to plan now.")]


def explain(
    *,
    file: File,
    options: PlanFlags,
    machine: Machine,
    state: StateFlags,
    example: Example,
    given: Given,
    as_json: AsJson = False,
) -> None:
    """Explain a plan.

    Prints its stages, the rank with the most work, the cost of moving each cut by one node, the active limit, and the
    other candidates. The options apply to a MODEL that is planned now.
    """
    from penstock.api.report import table_traces
    from penstock.ir import Plan, Trace, align_columns, bytes_text, percent_text, seconds_text
    from penstock.schedules import SCHEDULES

    if file.startswith(HF) or (".py:" in file and not Path(file).exists()):
        plan = make_plan(file, options, example, machine=machine, state=state)
    else:
        plan = read_record(Path(file))
        if not isinstance(plan, Plan):
            hint = "penstock plan MODEL --out FILE, then explain FILE"
            raise FormatError("only a plan can be explained", got=type(plan).__name__, hint=hint)
        if typed := given.of(PlanFlags, Machine, StateFlags, Example):
            hint = "penstock plan MODEL with these options, or explain without them"
            raise PlanError("options have no effect on a saved plan", file=file, options=", ".join(typed), hint=hint)
    others: dict[str, Trace] = {}
    if plan.choices.schedule not in (*SCHEDULES, "auto"):
        # The search for a plan has compared named schedules with each other, but not with an order that was given.
        others = dict(sorted(table_traces(plan).items(), key=lambda item: item[1].makespan))
    if as_json:
        search = plan.search
        found = {"reasons": search.reasons, "options": dict(search.asked), "lower_bound_seconds": plan.lower_bound}
        print_json({**found, "other_schedules": {name: trace.makespan for name, trace in others.items()}})
        return
    echo(plan.describe())
    if others:
        own = plan.predicted.makespan
        rows = [
            (
                name,
                seconds_text(trace.makespan),
                percent_text(trace.bubble),
                bytes_text(max(map(trace.peak_bytes, range(trace.num_ranks)))),
                f"{percent_text(abs(trace.makespan / own - 1))} {'longer' if trace.makespan > own else 'shorter'}",
            )
            for name, trace in others.items()
        ]
        table = align_columns([("schedule", "step", "bubble", "peak", "than this order"), *rows])
        echo("\n".join(("", "Named schedules for the same stages on the same ranks:", *table)))
