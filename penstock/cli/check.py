"""`penstock check`: prove an order deadlock-free, and compare a plan with the unsplit model."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from penstock.cli.files import read_record
from penstock.cli.models import HF, NO_EXAMPLE, build_model, source_of
from penstock.cli.options import AsJson, Blocks, Depth, Example
from penstock.cli.output import BAD_INPUT, RUN_FAILED, echo, failed, print_json
from penstock.cli.show import sizes_line
from penstock.cli.simulate import proven_orders
from penstock.cli.user_code import user_errors
from penstock.errors import CaptureError, FormatError, NoLossError, PenstockError

if TYPE_CHECKING:
    from penstock.api.check import ParityReport
    from penstock.ir import Comparison

File = Annotated[Path, Argument(metavar="FILE", help="CSV, text or JSON of a schedule, program, trace or plan.")]
InFlight = Annotated[int | None, Option(metavar="N", help="Maximum (stage, microbatch) pairs that a rank may hold.")]
Compared = Annotated[
    str | None,
    Option(metavar="MODEL", help="Also run a step of the plan and compare: FILE.py:FUNCTION or hf:NAME, as for plan."),
]
_PROVEN = """\
  every stage runs every microbatch forward once and backward once
  nothing is used before it exists or after it is freed
  every rank finishes when a send waits for its receive (gloo)
  and when the messages of two ranks match in the order they are issued (NCCL)"""


def check(
    *,
    file: File,
    model: Compared = None,
    example: Example,
    depth: Depth = None,
    block: Blocks = None,
    in_flight: InFlight = None,
    as_json: AsJson = False,
) -> None:
    """Prove that a schedule cannot deadlock, or show where it can.

    A schedule is proven as it is and as the program that it is lowered to. With --model, one step of the plan, with all
    ranks in this process, is compared with the unsplit model: loss, gradients and buffers.
    """
    import penstock

    if model is None and (example != NO_EXAMPLE or depth or block):
        raise PenstockError("--batch, --sequence, --weights, --depth and --block need --model", hint="--model hf:NAME")
    try:
        record = read_record(file)
        is_plan = isinstance(record, penstock.Plan)
        lowered = penstock.lower(record.orders, cuts=record.cuts) if is_plan else record
        orders = proven_orders(lowered, "the file has nothing to prove", in_flight)
    except PenstockError as error:
        if not as_json:
            raise
        values = {name: str(value) for name, value in error.values.items()}
        print_json({"proven": False, "problem": error.problem, **values})
        raise typer.Exit(BAD_INPUT) from None
    granularity = {"depth": depth, "basic_blocks": block or ()}
    report = _compare(record, model, example, granularity) if model else None
    if as_json:
        sizes = {
            "ranks": orders.num_ranks,
            "stages": orders.num_stages,
            "microbatches": orders.num_microbatches,
            "actions": len(orders.table.codes),
        }
        result: dict[str, Any] = {"proven": True, "type": type(orders).__name__, **sizes}
        if report:
            parts = {"microbatches": report.loop, "whole_batch": report.whole}
            compared = {name: _comparison_dict(part) for name, part in parts.items() if part is not None}
            result["parity"] = {"equal": report.ok, **compared, "notes": list(report.notes)}
        print_json(result)
    else:
        echo(f"proven\n{sizes_line(orders)}\n{_PROVEN}" + (f"\n\n{report}" if report else ""))
    if report and not report.ok:
        raise failed("the plan does not reproduce the unsplit model", RUN_FAILED)


def _compare(record: Any, model: str, example: Example, granularity: dict[str, Any]) -> "ParityReport":
    """Run `penstock.check`; a model that returns no loss gets the mean of its squared outputs as loss."""
    import penstock
    from penstock.ir import Plan

    if not isinstance(record, Plan):
        hint = f"penstock plan {model} --schedule FILE.csv --out plan.json, then check plan.json"
        raise FormatError("--model needs a plan, which has the cuts of the model", got=type(record).__name__, hint=hint)
    if model.startswith(HF):
        example = replace(example, weights=True)  # only real weights can be compared
    problem = "the model failed on the batch"
    with build_model(model, example) as (module, args, kwargs), user_errors(problem, source_of(model), CaptureError):
        try:
            return penstock.check(module, record, args, kwargs, **granularity)
        except NoLossError:
            return penstock.check(module, record, args, kwargs, loss_fn=_mean_square, **granularity)


def _mean_square(output: Any, target: Any) -> Any:
    from torch import Tensor

    from penstock.ir import leaves

    tensors = [leaf for leaf in leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return sum(tensor.float().square().mean() for tensor in tensors)


def _comparison_dict(part: "Comparison") -> dict[str, Any]:
    worst = part.largest
    largest = {"name": worst.name, "stage": worst.stage, "relative": str(worst.relative), "limit": worst.tolerance}
    return {"equal": part.ok, "identical": part.is_identical, "compared": len(part.differences), "largest": largest}
