"""explain: why a plan cuts and orders a model as it does."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument

from penstock.cli.files import read_noun
from penstock.cli.options import AsJson
from penstock.cli.screen import print_json
from penstock.errors import FormatError

File = Annotated[Path, Argument(metavar="FILE", help="The JSON of a plan.")]


def explain(*, file: File, as_json: AsJson = False) -> None:
    """Say why a plan is as it is.

    Its stages, which rank works most, what moving each cut by one node would cost, which limit is active, and the
    plans that were looked at beside it.
    """
    from penstock.ir.plan import Plan

    plan = read_noun(file)
    if not isinstance(plan, Plan):
        raise FormatError("only a plan can be explained", noun=type(plan).__name__, hint="penstock plan --out FILE")
    if as_json:
        print_json({"reasons": plan.search.reasons, "asked": dict(plan.search.asked), "bound": plan.lower_bound})
    else:
        typer.echo(plan.describe())
