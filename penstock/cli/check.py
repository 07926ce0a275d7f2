"""`penstock check`: prove an order deadlock-free, and compare a plan with the unsplit model."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from penstock.cli.files import read_record
from penstock.cli.models import HF, NO_EXAMPLE, build_model, source_of
from penstock.cli.options import AsJson, Blocks, Depth, Example
from penstock.cli.output import BAD_INPUT, RUN_FAILED, echo, failed, print_json
from penstock.cli.plan import LossExample
from penstock.cli.show import sizes_line
from penstock.cli.simulate import proven_orders
from penstock.cli.training_job import loss_example
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
Loss = Annotated[
    str | None,
    Option(metavar="NAME", help="Loss of that step: a function of torch.nn.functional, or FILE.py:FUNCTION."),
]
Data = Annotated[
    str | None,
    Option(metavar="FILE.py:FUNCTION", help="Compare on the first batch that this yields, as for train."),
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
    loss: Loss = None,
    data: Data = None,
    in_flight: InFlight = None,
    as_json: AsJson = False,
) -> None:
    """Prove that a schedule cannot deadlock, or show where it can.

    A schedule is proven as it is and as the program that it is lowered to. With --model, one step of the plan, with all
    ranks in this process, is compared with the unsplit model: loss, gradients and buffers. Without --loss, the loss is
    that of the model, or the mean of its squared outputs.
    """
    import penstock

    if model is None and (example != NO_EXAMPLE or depth or block or loss or data):
        problem = "--batch, --sequence, --weights, --depth, --block, --loss and --data need --model"
        raise PenstockError(problem, hint="--model hf:NAME")
    if loss is not None and data is None:
        raise PenstockError("--loss needs --data, whose first batch has a target", hint="--data FILE.py:FUNCTION")
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
    options = {"depth": depth, "basic_blocks": block or ()}
    with nullcontext() if data is None else loss_example(loss, data) as given:
        report = _compare(record, model, example, options, given) if model else None
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


def _compare(
    record: Any, model: str, example: Example, options: dict[str, Any], given: LossExample | None
) -> "ParityReport":
    """Run `penstock.check` with some options on the given batch and loss, by default on the batch of the model.

    A model that returns no loss gets the mean of its squared outputs as loss.
    """
    import penstock
    from penstock.ir import Plan

    if not isinstance(record, Plan):
        hint = f"penstock plan {model} --schedule FILE.csv --out plan.json, then check plan.json"
        raise FormatError("--model needs a plan, which has the cuts of the model", got=type(record).__name__, hint=hint)
    if model.startswith(HF):
        example = replace(example, weights=True)  # only real weights can be compared
    problem = "the model failed on the batch"
    with build_model(model, example) as (module, args, kwargs), user_errors(problem, source_of(model), CaptureError):
        if given is not None:
            args, kwargs, target = given.batch
            options = options | {"target": target, "loss_fn": given.function}
        try:
            return penstock.check(module, record, args, kwargs, **options)
        except NoLossError:
            return penstock.check(module, record, args, kwargs, **options | {"loss_fn": _mean_square})


def _mean_square(output: Any, target: Any) -> Any:
    from torch import Tensor

    from penstock.capture import is_inexact, real_entries
    from penstock.ir import leaves

    tensors = [real_entries(leaf) for leaf in leaves(output) if isinstance(leaf, Tensor) and is_inexact(leaf)]
    return sum(tensor.float().square().mean() for tensor in tensors)


def _comparison_dict(part: "Comparison") -> dict[str, Any]:
    worst = part.largest
    largest = {"name": worst.name, "stage": worst.stage, "relative": str(worst.relative), "limit": worst.tolerance}
    return {"equal": part.ok, "identical": part.is_identical, "compared": len(part.differences), "largest": largest}
