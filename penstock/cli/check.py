"""check: orders from a file, proven or refused, and a plan run beside the unsplit model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from penstock.cli.builds import NOTHING_MADE_UP
from penstock.cli.files import read_noun
from penstock.cli.options import AsJson, Example
from penstock.cli.outcome import BAD_INPUT, RUN_FAILED, failed
from penstock.cli.parity import parity, parity_plain
from penstock.cli.runs import prove
from penstock.cli.screen import print_json
from penstock.cli.show import described
from penstock.errors import FormatError, PenstockError

if TYPE_CHECKING:
    from penstock.ir import Program, Schedule

File = Annotated[Path, Argument(metavar="FILE", help="The CSV, text or JSON of a schedule, program, trace or plan.")]
InFlight = Annotated[int | None, Option(metavar="N", help="Most (stage, microbatch) that a rank may hold at once.")]


Beside = Annotated[
    str | None,
    Option(metavar="MODEL", help="Also take a step by the plan and compare: FILE.py:FUNCTION or hf:NAME, as for plan."),
]


def check(
    *, file: File, model: Beside = None, example: Example, in_flight: InFlight = None, as_json: AsJson = False
) -> None:
    """Prove that orders cannot deadlock, or say where.

    A schedule is proven as it is, and as the program that it is lowered to. With --model a step by the plan, all ranks
    in this process, is compared with the unsplit model: loss, gradients and buffers.
    """
    if model is None and example != NOTHING_MADE_UP:
        raise PenstockError("--batch, --sequence and --weights are for a model", hint="--model hf:NAME")
    try:
        noun = read_noun(file)
        orders = _proven(noun, in_flight)
    except PenstockError as error:
        if not as_json:
            raise
        values = {name: str(value) for name, value in error.values.items()}
        print_json({"proven": False, "problem": error.problem, **values})
        raise typer.Exit(BAD_INPUT) from None
    found = parity(noun, model, example) if model else None
    if as_json:
        extra = {"parity": parity_plain(found)} if found else {}
        print_json({"proven": True, "noun": type(orders).__name__, **_sizes(orders), **extra})
    else:
        typer.echo(f"proven\n{described(orders)}\n{_MEANING}" + (f"\n\n{found}" if found else ""))
    if found and not found.ok:
        raise failed("the plan does not train with the numbers of the model", RUN_FAILED)


_MEANING = """\
  every stage runs every microbatch forward once and backward once
  nothing is used before it exists or after it is freed
  every rank gets to its end when a send waits for its receive (gloo)
  and when the messages of two ranks meet in the order they are issued (NCCL)"""


def _proven(noun: Any, in_flight: int | None) -> "Schedule | Program":
    """The orders inside the noun, once they are proven."""
    import penstock
    from penstock.ir import Plan, Trace

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
