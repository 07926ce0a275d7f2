"""check: orders from a file, proven or refused."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from penstock.cli.files import read_noun
from penstock.cli.options import AsJson
from penstock.cli.outcome import BAD_INPUT
from penstock.cli.runs import prove
from penstock.cli.screen import print_json
from penstock.cli.show import described
from penstock.errors import FormatError, PenstockError

if TYPE_CHECKING:
    from penstock.ir.program import Program
    from penstock.ir.schedule import Schedule

File = Annotated[Path, Argument(metavar="FILE", help="The CSV, text or JSON of a schedule, program, trace or plan.")]
InFlight = Annotated[int | None, Option(metavar="N", help="Most (stage, microbatch) that a rank may hold at once.")]


def check(*, file: File, in_flight: InFlight = None, as_json: AsJson = False) -> None:
    """Prove that orders cannot deadlock, or say where.

    A schedule is proven as it is, and as the program that it is lowered to.
    """
    try:
        orders = _proven(read_noun(file), in_flight)
    except PenstockError as error:
        if not as_json:
            raise
        values = {name: str(value) for name, value in error.values.items()}
        print_json({"proven": False, "problem": error.problem, **values})
        raise typer.Exit(BAD_INPUT) from None
    if as_json:
        print_json({"proven": True, "noun": type(orders).__name__, **_sizes(orders)})
    else:
        typer.echo(f"proven\n{described(orders)}\n{_MEANING}")


_MEANING = """\
  every stage runs every microbatch forward once and backward once
  nothing is used before it exists or after it is freed
  every rank gets to its end when a send waits for its receive (gloo)
  and when the messages of two ranks meet in the order they are issued (NCCL)"""


def _proven(noun: Any, in_flight: int | None) -> "Schedule | Program":
    """The orders inside the noun, once they are proven."""
    import penstock
    from penstock.ir.plan import Plan
    from penstock.ir.trace import Trace

    orders = noun.program if isinstance(noun, Trace) else noun
    if isinstance(noun, Plan):
        orders = penstock.lower(noun.schedule, cuts=noun.cuts)
    if not isinstance(orders, penstock.Schedule | penstock.Program):
        raise FormatError("nothing to prove", noun=type(noun).__name__, hint="a schedule, program, trace or plan")
    prove(orders, in_flight)
    return orders


def _sizes(orders: "Schedule | Program") -> dict[str, int]:
    return {
        "ranks": orders.num_ranks,
        "stages": orders.num_stages,
        "microbatches": orders.num_microbatches,
        "actions": len(orders.table.codes),
    }
