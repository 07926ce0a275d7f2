"""simulate: one schedule, or all of them side by side, as figures and pictures."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from penstock.cli.files import check_targets, write
from penstock.cli.options import AsJson, Outputs, Sizes, Times
from penstock.cli.runs import Run, chosen, run, swept
from penstock.cli.screen import look, note, print_json
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.ir import Trace

Name = Annotated[str, Argument(metavar="NAME", help="A schedule, such as 1f1b or zbv, or all of them.")]
Sweep = Annotated[str | None, Option(metavar="M,M,...", help="Numbers of microbatches to compare.")]


def simulate(
    *, name: Name = "all", sizes: Sizes, sweep: Sweep = None, times: Times, outputs: Outputs, as_json: AsJson = False
) -> None:
    """Predict time, bubble and memory of schedules.

    One schedule, or all side by side. Seconds and bytes are those of one rank's layers, however many stages they are
    cut into, so all schedules do the same work. Every program is proven free of deadlock before it is simulated.
    """
    check_targets((outputs.svg, outputs.png, outputs.memory_svg, outputs.trace, outputs.csv))
    names, left_out = chosen(name, sizes)
    runs = [run(each, size, times) for each in names for size in swept(sizes, sweep)]
    if outputs.csv and len(runs) > 1:
        hint = f"penstock simulate {names[0]} --csv {outputs.csv}"
        raise PenstockError("a CSV holds one schedule", schedules=len(runs), hint=hint)
    if left_out:
        note(f"left out, as they want other stages per rank: {', '.join(left_out)}")
    if as_json:
        print_json([each.figures() for each in runs])
    else:
        _print(runs)
    save(runs, outputs)


def _print(runs: Sequence[Run]) -> None:
    from penstock.views import Table, Terminal

    if len(runs) == 1:
        look(Terminal(color=False), {runs[0].name: runs[0].trace})
    look(Table(), labelled(runs))


def labelled(runs: Sequence[Run]) -> "dict[str, Trace]":
    """The traces by the names of their schedules, with the microbatches where those differ."""
    if len({each.schedule.num_microbatches for each in runs}) == 1:
        return {each.name: each.trace for each in runs}
    return {f"{each.name}, {each.schedule.num_microbatches} microbatches": each.trace for each in runs}


def save(runs: Sequence[Run], outputs: Outputs) -> None:
    """Write the files that are asked for."""
    for path, document in documents(runs, outputs).items():
        write(path, document())
        note(f"wrote {path}")


def documents(runs: Sequence[Run], outputs: Outputs) -> dict[Path, Callable[[], str | bytes]]:
    """How to make the document of every file that is asked for."""
    from penstock.views import Chrome, Memory, Timeline

    traces = labelled(runs)
    columns = 1 if len(runs) < 4 else 2
    makers: tuple[tuple[Path | None, Callable[[], str | bytes]], ...] = (
        (outputs.svg, lambda: Timeline(columns=columns)(traces)),
        (outputs.png, lambda: Timeline(columns=columns, format="png")(traces)),
        (outputs.memory_svg, lambda: Memory(columns=columns)(traces)),
        (outputs.trace, lambda: Chrome()(traces)),
        (outputs.csv, lambda: runs[0].schedule.to_csv()),
    )
    return {path: document for path, document in makers if path is not None}
