"""plan: a model of the user's measured, cut and ordered for some ranks, with what it will take."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from penstock.cli.builds import built, told
from penstock.cli.capture import Target
from penstock.cli.files import check_targets
from penstock.cli.options import AsJson
from penstock.cli.screen import note, print_json
from penstock.errors import CaptureError, PlanError

if TYPE_CHECKING:
    from penstock.ir.plan import Plan


@dataclass(frozen=True)
class Wishes:
    """What is asked of a plan; what is "auto" is searched for."""

    ranks: Annotated[int, Option(metavar="P", help="Pipeline ranks.")] = 4
    microbatches: Annotated[str, Option(metavar="M", help='Pieces that a batch is cut into, or "auto".')] = "auto"
    schedule: Annotated[str, Option(metavar="NAME", help='A schedule, the CSV of one, or "auto".')] = "auto"
    partitioner: Annotated[str, Option(metavar="NAME", help='A way to cut, or "auto".')] = "auto"
    stages_per_rank: Annotated[int | None, Option(metavar="V", help="Stages that each rank holds.")] = None
    memory: Annotated[str | None, Option(metavar="SIZE", help="What a rank has, such as 24GiB.")] = None
    recompute: Annotated[str, Option(metavar="WHICH", help="none, full or auto: compute activations again.")] = "none"
    budget: Annotated[float, Option(metavar="SECONDS", help="How long to look for something better.")] = 10.0


Out = Annotated[Path | None, Option(metavar="FILE", help="Write the plan, to train by and to show.")]


def plan(*, target: Target, wishes: Wishes, out: Out = None, as_json: AsJson = False) -> None:
    """Search for the best plan of a model.

    The model is measured on the batch, here. Cuts, placement, order, microbatches and recomputation are searched for
    together, by the predicted step, under the memory of a rank; the runners-up are shown, and why each lost.
    """
    from penstock.ir import codec

    check_targets((out,), source=Path(target.rpartition(":")[0]))
    found = _planned(target, wishes)
    if as_json:
        print_json(json.loads(codec.to_json(found)))
    else:
        typer.echo(found.describe())
    if out:
        found.save(out)
        note(f"wrote {out}")


def _planned(target: str, wishes: Wishes) -> "Plan":
    import penstock

    with built(target) as (model, args, kwargs):
        path = Path(target.rpartition(":")[0])
        with told("the model failed on the batch while it was recorded or measured", path, CaptureError):
            return penstock.plan(
                model,
                args,
                kwargs,
                ranks=wishes.ranks,
                microbatches=_number(wishes.microbatches),
                schedule=wishes.schedule,
                partitioner=wishes.partitioner,
                stages_per_rank=wishes.stages_per_rank,
                memory=wishes.memory,
                recompute=wishes.recompute,
                budget_seconds=wishes.budget,
            )


def _number(given: str) -> int | str:
    if given == "auto":
        return given
    if not given.isdecimal():
        raise PlanError("microbatches is a whole number or auto", given=repr(given), hint="--microbatches 8")
    return int(given)
