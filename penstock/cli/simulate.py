"""`penstock simulate`: predict one schedule, or all of them side by side."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from typer import Argument, Option

from penstock.cli.files import check_picture, check_targets, read_record, write
from penstock.cli.options import AsJson, Given, Outputs, Sizes, Times
from penstock.cli.output import note, print_json, print_view
from penstock.errors import FormatError, PenstockError

if TYPE_CHECKING:
    from penstock.ir import Program, Schedule, Trace

Name = Annotated[
    str, Argument(metavar="NAME", help="A schedule, such as 1f1b or zbv, all of them, or a file of an order.")
]
Sweep = Annotated[str | None, Option(metavar="M,M,...", help="Numbers of microbatches to compare.")]


class Simulated(NamedTuple):
    """A schedule of the table and its predicted trace."""

    name: str
    schedule: "Schedule"
    trace: "Trace"

    def metrics(self) -> dict[str, Any]:
        """Sizes, time, bubble and memory as JSON values."""
        from penstock.views import summary

        metrics = summary(self.trace)
        sizes = {
            "ranks": self.schedule.num_ranks,
            "stages_per_rank": self.schedule.num_stages // self.schedule.num_ranks,
            "microbatches": self.schedule.num_microbatches,
        }
        return {"schedule": self.name, **sizes, **metrics._asdict(), "idle": metrics.idle._asdict()}


def simulate(
    *,
    name: Name = "all",
    sizes: Sizes,
    sweep: Sweep = None,
    times: Times,
    outputs: Outputs,
    given: Given,
    as_json: AsJson = False,
) -> None:
    """Predict time, bubble and memory of schedules.

    One schedule, all side by side, or the order in a file; a plan has its own costs. Seconds and bytes are
    those of one rank's layers, however many stages they are cut into, so all schedules do the same work. Every
    program is proven deadlock-free before it is simulated.
    """
    from penstock.schedules import SCHEDULES
    from penstock.views import Table, Terminal

    check_targets((outputs.svg, outputs.png, outputs.memory_svg, outputs.trace, outputs.csv))
    for picture in (outputs.svg, outputs.memory_svg):
        check_picture(picture, ".svg")
    check_picture(outputs.png, ".png")
    left_out: list[str] = []
    path = Path(name)
    # A schedule has precedence over a file of the same name, which is given as ./NAME.
    is_path = path.suffix or len(path.parts) > 1 or name.startswith(".")
    if is_path or (path.is_file() and name not in ("all", *SCHEDULES)):
        if given.of(Sizes) or sweep is not None:
            hint = f"penstock simulate {name}"
            raise PenstockError(
                "ranks, stages and microbatches must not be given: the file has them", file=name, hint=hint
            )
        runs = [simulate_file(path, times, given)]
    else:
        if sweep is not None and "microbatches" in given:
            hint = f"--sweep {sweep},{sizes.microbatches} for all of them"
            raise PenstockError("--microbatches and --sweep must not be given together", sweep=sweep, hint=hint)
        names, left_out = named_schedules(name, sizes)
        runs = [simulate_schedule(each, size, times) for each in names for size in _sweep(sizes, sweep)]
    if outputs.csv and len(runs) > 1:
        hint = f"penstock simulate {runs[0].name} --csv {outputs.csv}"
        raise PenstockError("--csv needs a single schedule", schedules=len(runs), hint=hint)
    if left_out:
        note(f"left out, because they need another number of stages per rank: {', '.join(left_out)}")
    if as_json:
        print_json([each.metrics() for each in runs])
    else:
        if len(runs) == 1:
            print_view(Terminal(color=False), {runs[0].name: runs[0].trace})
        print_view(Table(), _labelled(runs))
    for path, document in documents(runs, outputs).items():
        write(path, document())
        note(f"wrote {path}")


def simulate_schedule(name: str, sizes: Sizes, times: Times) -> Simulated:
    import penstock

    build = partial(penstock.schedule, name, sizes.ranks, sizes.microbatches, stages_per_rank=sizes.stages_per_rank)
    schedule = build()
    if not times.forward == times.input_grad == times.weight_grad:
        # Weight gradients are placed where they fill gaps, which depends on how long passes take.
        schedule = build(costs=times.costs(schedule.placement))
    program = penstock.lower(schedule)
    penstock.verify(program)
    return Simulated(name, schedule, simulate_program(program, times))


def simulate_file(path: Path, times: Times, given: Given) -> Simulated:
    """Prove and simulate the order of a file, as `check`, `show` and `plan` read it."""
    import penstock
    from penstock.ir import Plan

    record = read_record(path)
    if isinstance(record, Plan):
        if given.of(Times):
            hint = f"penstock simulate {path}"
            raise PenstockError("costs and links must not be given: the plan has them", file=path, hint=hint)
        return Simulated(path.name, record.schedule, penstock.simulate(record))
    program = penstock.lower(proven_orders(record, "the file has no order to simulate"))
    return Simulated(path.name, program.schedule, simulate_program(program, times))


def simulate_program(program: "Program", times: Times) -> "Trace":
    """Simulate a program with the costs and links of the options."""
    import penstock

    return penstock.simulate(program, times.costs(program.placement), times.cluster(program.num_ranks))


def proven_orders(record: Any, problem: str, in_flight: int | None = None) -> "Schedule | Program":
    """Prove and return the order of a schedule, program or trace; any other record is refused with the problem."""
    import penstock

    orders = record.program if isinstance(record, penstock.Trace) else record
    if not isinstance(orders, penstock.Schedule | penstock.Program):
        hint = "a schedule, program, trace or plan"
        raise FormatError(problem, got=type(record).__name__, hint=hint)
    prove(orders, in_flight)
    return orders


def prove(orders: "Schedule | Program", in_flight: int | None = None) -> None:
    """Verify orders; a schedule also as the program that it is lowered to."""
    import penstock

    penstock.verify(orders, in_flight=in_flight)
    if isinstance(orders, penstock.Schedule):
        penstock.verify(penstock.lower(orders))


def named_schedules(name: str, sizes: Sizes) -> tuple[list[str], list[str]]:
    """The schedules for a name or "all", and those left out because they cannot have that many stages per rank."""
    from penstock.schedules import SCHEDULES, find

    if name.lower() != "all":
        return [find(name).name], []
    wanted = sizes.stages_per_rank
    allowed = {key: member.allowed_stages_per_rank for key, member in SCHEDULES.items()}
    misfits = [key for key, counts in allowed.items() if wanted and counts and wanted not in counts]
    return [key for key in SCHEDULES if key not in misfits], misfits


def _sweep(sizes: Sizes, sweep: str | None) -> Iterable[Sizes]:
    """The sizes for every number of microbatches in a text such as `4,8,16`."""
    if sweep is None:
        return [sizes]
    try:
        counts = dict.fromkeys(map(int, sweep.split(",")))
    except ValueError:
        hint = "--sweep 4,8,16"
        raise PenstockError("--sweep must be a list of numbers of microbatches", got=repr(sweep), hint=hint) from None
    return [replace(sizes, microbatches=count) for count in counts]


def _labelled(runs: Sequence[Simulated]) -> "dict[str, Trace]":
    """The traces by schedule, and by number of microbatches if these differ."""
    if len({each.schedule.num_microbatches for each in runs}) == 1:
        return {each.name: each.trace for each in runs}
    return {f"{each.name}, {each.schedule.num_microbatches} microbatches": each.trace for each in runs}


def documents(runs: Sequence[Simulated], outputs: Outputs) -> dict[Path, Callable[[], str | bytes]]:
    """For every requested file, the function that makes its contents."""
    from penstock.views import Chrome, Memory, Timeline

    traces = _labelled(runs)
    columns = 1 if len(runs) < 4 else 2
    makers: tuple[tuple[Path | None, Callable[[], str | bytes]], ...] = (
        (outputs.svg, lambda: Timeline(columns=columns)(traces)),
        (outputs.png, lambda: Timeline(columns=columns, format="png")(traces)),
        (outputs.memory_svg, lambda: Memory(columns=columns)(traces)),
        (outputs.trace, lambda: Chrome()(traces)),
        (outputs.csv, lambda: runs[0].schedule.to_csv()),
    )
    return {path: maker for path, maker in makers if path is not None}
