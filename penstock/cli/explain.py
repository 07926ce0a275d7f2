"""`penstock explain`: why a plan cuts and orders a model as it does."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument

from penstock.cli.files import read_record
from penstock.cli.models import HF, NO_EXAMPLE
from penstock.cli.options import AsJson, Example
from penstock.cli.output import print_json
from penstock.cli.plan import Machine, PlanFlags, make_plan
from penstock.errors import FormatError, PlanError

File = Annotated[str, Argument(metavar="FILE", help="JSON file of a plan, or a MODEL to plan now.")]


def explain(*, file: File, options: PlanFlags, machine: Machine, example: Example, as_json: AsJson = False) -> None:
    """Explain a plan.

    Prints its stages, the rank with the most work, the cost of moving each cut by one node, the active limit, and the
    other candidates. The options apply to a MODEL that is planned now.
    """
    from penstock.ir import Plan

    if file.startswith(HF) or (".py:" in file and not Path(file).exists()):
        plan = make_plan(file, options, machine, example)
    else:
        plan = read_record(Path(file))
        if not isinstance(plan, Plan):
            hint = "penstock plan --out FILE"
            raise FormatError("only a plan can be explained", got=type(plan).__name__, hint=hint)
        if (options, machine, example) != (PlanFlags(), Machine(), NO_EXAMPLE):
            hint = "penstock plan MODEL with these options, or explain without them"
            raise PlanError("options have no effect on a saved plan", file=file, hint=hint)
    if as_json:
        search = plan.search
        print_json({"reasons": search.reasons, "options": dict(search.asked), "lower_bound_seconds": plan.lower_bound})
    else:
        typer.echo(plan.describe())
