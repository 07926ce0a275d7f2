"""plan: a model of the user's measured, cut and ordered for some ranks, with what it will take."""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from penstock.cli.builds import Model, built, source_of, told
from penstock.cli.emit import check_tool, emit, with_whole_modules
from penstock.cli.files import check_targets, write
from penstock.cli.options import AsJson, Example
from penstock.cli.screen import note, print_json
from penstock.errors import CaptureError, PartitionError, PlanError

if TYPE_CHECKING:
    from penstock.api.examples import Examples
    from penstock.cli.running import RunningRanks
    from penstock.ir import Cluster, DeviceSpeed, Plan, Schedule


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


@dataclass(frozen=True)
class Machine:
    """What the ranks are, where it is not this machine and the links are no matter."""

    flops: Annotated[
        float | None, Option(metavar="FLOP/S", help="Estimate for a device this fast, such as 3e14; else measure here.")
    ] = None
    memory_speed: Annotated[float | None, Option(metavar="B/S", help="Bytes per second its memory moves.")] = None
    bandwidth: Annotated[float | None, Option(metavar="B/S", help="Of a link between ranks; else without limit.")] = (
        None
    )
    latency: Annotated[float, Option(metavar="SECONDS", help="Of a message between ranks.")] = 0.0
    cores: Annotated[
        int | None,
        Option(min=1, metavar="N", help="Ranks that compute at once, as processes of one machine; else all."),
    ] = None
    slowness: Annotated[
        str | None, Option(metavar="F,F,...", help="How many times longer each rank takes, such as 1,1,1.8,1.")
    ] = None

    @classmethod
    def here(cls, ranks: int) -> "Machine":
        """This one: its cores are shared where the ranks are more."""
        cores = os.cpu_count() or 1
        return cls(cores=cores if cores < ranks else None)

    @property
    def speed(self) -> "DeviceSpeed | None":
        """The device to estimate for; None for this one."""
        from penstock.ir import DeviceSpeed

        if (self.flops is None) != (self.memory_speed is None):
            hint = "--flops 3e14 --memory-speed 2e12, about one large GPU in half precision"
            raise PlanError("--flops and --memory-speed belong together", hint=hint)
        return None if self.flops is None else DeviceSpeed(self.flops, self.memory_speed or 0.0)

    def cluster(self, ranks: int) -> "Cluster":
        """So many ranks with their links."""
        from penstock.ir import Cluster

        if ranks < 1:
            raise PlanError("a pipeline has 1 rank or more", ranks=ranks, hint="--ranks 4")
        slowness = _factors(self.slowness)
        return Cluster(ranks, None, self.latency, self.bandwidth, cores=self.cores, slowness=slowness)


@dataclass(frozen=True)
class Results:
    """What becomes of the plan."""

    out: Annotated[Path | None, Option(metavar="FILE", help="Write the plan, to train by and to show.")] = None
    emit: Annotated[
        str | None,
        Option(
            metavar="TOOL",
            help="Print lists of modules and the order as torchtitan or automodel reads them; or write them to --out.",
        ),
    ] = None


def plan(
    *,
    target: Model,
    wishes: Wishes,
    machine: Machine,
    example: Example,
    results: Results,
    as_json: AsJson = False,
) -> None:
    """Search for the best plan of a model.

    The model is measured on the batch, here; without weights, as hf: models are, its seconds are estimated. Cuts,
    placement, order, microbatches and recomputation are searched for together, by the predicted step, under the memory
    of a rank; the runners-up are shown, and why each lost. Under torchrun the plan is for the ranks that run, with the
    links that are measured between them.
    """
    from penstock.ir import to_json

    out = results.out
    check_targets((out,), source=source_of(target))
    if results.emit:
        check_tool(results.emit, out)
    found = _found(target, wishes, machine, example, in_modules=bool(results.emit))
    if found is None:
        return
    if results.emit:
        emit(found, results.emit, out, as_json)
    else:
        _print(found, as_json)
        if out:
            write(out, to_json(found))
            note(f"wrote {out}")
    is_plain = replace(machine, slowness=None) == Machine() and not found.cluster.links
    if is_plain and found.num_ranks > (cores := os.cpu_count() or 1):
        note(f"the figures are for {found.num_ranks} ranks with a core each; for this machine: --cores {cores}")


def _found(target: str, wishes: Wishes, machine: Machine, example: Example, in_modules: bool) -> "Plan | None":
    """The best plan; under torchrun on the first rank only."""
    from penstock.cli.running import is_rank, planned_under_torchrun

    if not is_rank():
        return planned(target, wishes, machine, example, in_modules)
    if machine != Machine():
        hint = "no option that describes the machine"
        raise PlanError("under torchrun links are measured and cores are counted", hint=hint)
    return planned_under_torchrun(target, wishes, example, in_modules)


def _print(found: "Plan", as_json: bool) -> None:
    from penstock.ir import to_json

    if as_json:
        print_json(json.loads(to_json(found)))
    else:
        typer.echo(found.describe())


def planned(
    target: str, wishes: Wishes, machine: "Machine | RunningRanks", example: Example, in_modules: bool = False
) -> "Plan":
    """The best plan of a model that is found; `in_modules`, one whose stages lists of modules can tell."""
    import penstock
    from penstock.api.examples import Examples

    wanted: dict[str, Any] = {
        "ranks": machine.cluster(wishes.ranks),
        "microbatches": _number(wishes.microbatches),
        "schedule": wishes.schedule,
        "partitioner": _partitioner(wishes.partitioner),
        "stages_per_rank": wishes.stages_per_rank,
        "memory": wishes.memory,
        "recompute": wishes.recompute,
        "budget_seconds": wishes.budget,
        "speed": machine.speed,
    }
    problem = "the model failed on the batch while it was recorded or measured"
    with built(target, example) as (model, args, kwargs), told(problem, source_of(target), CaptureError):
        _check_samples(Examples(model, args, kwargs), wanted["microbatches"])
        found = penstock.plan(model, args, kwargs, **wanted)
        if not in_modules:
            return found

        def again(lists: list[list[str]], schedule: "Schedule") -> "Plan":
            given = {"partitioner": lists, "schedule": schedule, "microbatches": "auto", "stages_per_rank": None}
            return penstock.plan(model, args, kwargs, **wanted | given)

        try:
            return with_whole_modules(found, again)
        except PartitionError as error:
            if wishes.schedule != "auto" or wishes.stages_per_rank is not None or found.num_stages == found.num_ranks:
                raise
            note(f"planned again with one stage per rank, as with {found.num_stages} stages: {error.problem}")
        return with_whole_modules(penstock.plan(model, args, kwargs, **wanted | {"stages_per_rank": 1}), again)


def _partitioner(name: str) -> str:
    """The name, known or refused as wrong usage before the model is built."""
    from penstock.partitioners import find

    try:
        return name if name == "auto" or find(name) else ""
    except PartitionError as error:
        raise PlanError(error.problem, hint=error.hint, **error.values) from None


def _check_samples(examples: "Examples", microbatches: int | str) -> None:
    """Refuse more microbatches than the batch has samples: those that are empty would be measured as full."""
    if isinstance(microbatches, int) and microbatches > 1:
        samples = examples.num_samples(microbatches)
        if samples < microbatches:
            hint = f"--microbatches {samples}, or a batch with more samples"
            sizes = {"samples": samples, "microbatches": microbatches}
            raise PlanError("the batch has fewer samples than microbatches", hint=hint, **sizes)


def _factors(given: str | None) -> tuple[float, ...] | None:
    if given is None:
        return None
    try:
        return tuple(map(float, given.split(",")))
    except ValueError:
        hint = "--slowness 1,1,1.8,1"
        raise PlanError("slowness is a number for each rank", given=repr(given), hint=hint) from None


def _number(given: str) -> int | str:
    if given == "auto":
        return given
    if not given.isdecimal():
        raise PlanError("microbatches is a whole number or auto", given=repr(given), hint="--microbatches 8")
    return int(given)
