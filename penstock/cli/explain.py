"""explain: why a plan cuts and orders a model as it does."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument

from penstock.cli.builds import HF, NOTHING_MADE_UP
from penstock.cli.files import read_noun
from penstock.cli.options import AsJson, Example
from penstock.cli.plan import Machine, Wishes, planned
from penstock.cli.screen import print_json
from penstock.errors import FormatError, PlanError

if TYPE_CHECKING:
    from penstock.ir import Plan

File = Annotated[str, Argument(metavar="FILE", help="The JSON of a plan, or a MODEL to plan now, as for plan.")]


def explain(*, file: File, wishes: Wishes, machine: Machine, example: Example, as_json: AsJson = False) -> None:
    """Say why a plan is as it is.

    Its stages, which rank works most, what moving each cut by one node would cost, which limit is active, and the
    plans that were looked at beside it. The options are for a MODEL that has no plan yet.
    """
    plan = planned(file, wishes, machine, example) if _is_model(file) else _read(file, wishes, machine, example)
    if as_json:
        print_json({"reasons": plan.search.reasons, "asked": dict(plan.search.asked), "bound": plan.lower_bound})
    else:
        typer.echo(plan.describe())


def _is_model(file: str) -> bool:
    return file.startswith(HF) or (".py:" in file and not Path(file).exists())


def _read(file: str, wishes: Wishes, machine: Machine, example: Example) -> "Plan":
    from penstock.ir import Plan

    plan = read_noun(Path(file))
    if not isinstance(plan, Plan):
        raise FormatError("only a plan can be explained", noun=type(plan).__name__, hint="penstock plan --out FILE")
    if (wishes, machine, example) != (Wishes(), Machine(), NOTHING_MADE_UP):
        hint = "penstock plan MODEL with these options, or explain without them"
        raise PlanError("the plan is made already: options would change nothing", file=file, hint=hint)
    return plan
