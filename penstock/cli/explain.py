"""`penstock explain`: why a plan cuts and orders a model as it does."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from penstock.cli.files import read_record
from penstock.cli.models import HF, NO_EXAMPLE
from penstock.cli.options import AsJson, Example
from penstock.cli.output import echo, print_json
from penstock.cli.plan import Machine, PlanFlags, StateFlags, make_plan
from penstock.errors import FormatError, PlanError

if TYPE_CHECKING:
    from penstock.ir import Plan, Trace

File = Annotated[str, Argument(metavar="FILE", help="JSON file of a plan, or a MODEL to plan now.")]


def explain(
    *,
    file: File,
    options: PlanFlags,
    machine: Machine,
    state: StateFlags,
    example: Example,
    as_json: AsJson = False,
) -> None:
    """Explain a plan.

    Prints its stages, the rank with the most work, the cost of moving each cut by one node, the active limit, and the
    other candidates. The options apply to a MODEL that is planned now.
    """
    from penstock.ir import Plan

    if file.startswith(HF) or (".py:" in file and not Path(file).exists()):
        plan = make_plan(file, options, example, machine=machine, state=state)
    else:
        plan = read_record(Path(file))
        if not isinstance(plan, Plan):
            hint = "penstock plan --out FILE"
            raise FormatError("only a plan can be explained", got=type(plan).__name__, hint=hint)
        if (options, machine, state, example) != (PlanFlags(), Machine(), StateFlags(), NO_EXAMPLE):
            hint = "penstock plan MODEL with these options, or explain without them"
            raise PlanError("options have no effect on a saved plan", file=file, hint=hint)
    others = _named_schedules(plan)
    if as_json:
        search = plan.search
        found = {"reasons": search.reasons, "options": dict(search.asked), "lower_bound_seconds": plan.lower_bound}
        print_json({**found, "other_schedules": {name: trace.makespan for name, trace in others.items()}})
    else:
        echo(plan.describe())
        if others:
            echo("\n".join(("", *_comparison(plan, others))))


def _named_schedules(plan: "Plan") -> "dict[str, Trace]":
    """The named schedules for the same stages, the fastest first, if the order of the plan was given."""
    from penstock.api.report import table_traces
    from penstock.schedules import SCHEDULES

    # The search for a plan has compared named schedules with each other, but not with an order that was given.
    if plan.choices.schedule in (*SCHEDULES, "auto"):
        return {}
    return dict(sorted(table_traces(plan).items(), key=lambda item: item[1].makespan))


def _comparison(plan: "Plan", others: "dict[str, Trace]") -> Iterator[str]:
    from penstock.ir import align_columns, bytes_text, percent_text, seconds_text

    yield "Named schedules for the same stages on the same ranks:"
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
    yield from align_columns([("schedule", "step", "bubble", "peak", "than this order"), *rows])
