"""`penstock show`: print any file that penstock wrote."""

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from penstock.cli.files import check_picture, check_targets, read_record, write
from penstock.cli.options import AsJson
from penstock.cli.output import echo, note, print_rich, print_table, print_view
from penstock.errors import ScheduleError, ViewError

if TYPE_CHECKING:
    from penstock.ir import Program, Run, Schedule

File = Annotated[Path, Argument(metavar="FILE", help="JSON of any record, or CSV or text of a schedule or program.")]
ViewName = Annotated[str | None, Option("--view", metavar="NAME", help="The view to show.")]
Out = Annotated[Path | None, Option(metavar="FILE", help="Write the view here; .png draws timeline or memory as PNG.")]
MAX_ITEMS = 40  # of a list


def show(*, file: File, view: ViewName = None, out: Out = None, as_json: AsJson = False) -> None:
    """Show the contents of a file in the terminal.

    A schedule, program, trace, plan, graph, profile, run, costs, cluster, or any other record. Orders are drawn with
    every pass taking one second. With --json, prints the record as JSON that penstock reads, also for a CSV file.

    With --view, shows one view instead. Of orders, traces, plans and runs: terminal, table, timeline, memory, chrome;
    of graphs, plans and runs: outline, cuts, model; of plans and runs: report; of profiles: profile.
    """
    import penstock
    from penstock.cli.simulate import prove
    from penstock.ir import Graph, Plan, Profile, Program, Run, Schedule, Trace, to_json
    from penstock.views import Outline
    from penstock.views import Profile as ProfileView

    check_targets((out,), source=file)
    if as_json and (view or out):
        hint = "--view chrome without --json, which is JSON, or --json alone"
        raise ViewError("--json prints the record, and must not be given with --view or --out", hint=hint)
    record = read_record(file)
    if view or out:
        _show_view(record, view, out)
    elif as_json:
        echo(to_json(record), end="")
    elif isinstance(record, Schedule | Program):
        echo(sizes_line(record))
        try:
            prove(record)
        except ScheduleError as error:
            echo(f"{record}\n\nnot proven: {error}")
        else:
            _show_trace(penstock.simulate(record))
    elif isinstance(record, Trace):
        _show_trace(record)
    elif isinstance(record, Plan):
        echo(str(record))
    elif isinstance(record, Graph):
        print_view(Outline(), record)
    elif isinstance(record, Run):
        _show_run(record)
    elif isinstance(record, Profile):
        print_view(ProfileView(), record)
    else:
        from rich.console import Console
        from rich.pretty import Pretty

        print_rich(Console(), Pretty(record, max_length=MAX_ITEMS, expand_all=True))


def sizes_line(orders: "Schedule | Program") -> str:
    """The kind and the sizes of orders in one line."""
    from penstock.ir import counted

    sizes = {
        "rank": orders.num_ranks,
        "stage": orders.num_stages,
        "microbatch": orders.num_microbatches,
        "action": len(orders.table.codes),
    }
    return f"{type(orders).__name__}: {', '.join(counted(count, word) for word, count in sizes.items())}"


def _show_view(record: Any, name: str | None, out: Path | None) -> None:
    """Print a view of the table, or write it to a file."""
    from penstock.views import VIEWS, RichView

    hint = f"--view with one of {', '.join(VIEWS)}"
    if name is None:
        raise ViewError("--out must be given with --view, the view to write", out=out, hint=hint)
    if name not in VIEWS:
        raise ViewError("unknown view", view=repr(name), hint=hint)
    drawn = [key for key, each in VIEWS.items() if any(field.name == "format" for field in fields(each))]
    as_png = out is not None and out.suffix.lower() == ".png"
    if as_png and name not in drawn:
        raise ViewError("this view cannot be drawn as PNG", view=name, file=out, hint=f"--view {' or '.join(drawn)}")
    view = VIEWS[name](**({"format": "png"} if as_png else {}))
    if view.suffix in (".svg", ".png"):
        check_picture(out, *((".svg", ".png") if name in drawn else (".svg",)))
    subject = _subject(record, view.record)
    if out:
        write(out, view(subject))
        note(f"wrote {out}")
    elif isinstance(view, RichView):
        print_view(view, subject)
    else:
        echo(view(subject))


def _subject(record: Any, wanted: type) -> Any:
    """Convert a record to what a view of `wanted` records takes; refused if it cannot be."""
    import penstock
    from penstock.cli.simulate import prove
    from penstock.ir import Graph, Plan, Program, Run, Schedule, Trace

    plan = record.plan if isinstance(record, Run) else record
    if wanted is Trace and isinstance(record, Run):
        traces = {"predicted": penstock.simulate(plan), "measured": record.trace}
        return {name: trace for name, trace in traces.items() if trace is not None}
    if wanted is Trace and isinstance(record, Schedule | Program):
        prove(record)
    if wanted is Trace and isinstance(record, Schedule | Program | Plan):
        return penstock.simulate(record)
    if wanted is Graph and isinstance(plan, Plan):
        return plan.graph, plan.partition
    if wanted is Plan and isinstance(plan, Plan):
        from penstock.api.report import contents_of

        return contents_of(record)
    if not isinstance(record, wanted):
        got, hint = type(record).__name__, f"a file with a {wanted.__name__.lower()}"
        raise ViewError(f"this view must be given a {wanted.__name__.lower()}", got=got, hint=hint)
    return record


def _show_trace(trace: Any) -> None:
    from penstock.views import Table, Terminal

    print_view(Terminal(color=False), trace)
    print_view(Table(), {"trace": trace})


def _show_run(run: "Run") -> None:
    """The plan, the steps, and the last recorded step."""
    from penstock.ir import bytes_text, seconds_text

    def number(value: float | None) -> str:
        return "not finite" if value is None else f"{value:.6g}"

    echo(f"{run.plan}\n")
    rows = [(str(m.step), number(m.loss), number(m.grad_norm), seconds_text(m.seconds)) for m in run.steps]
    if len(rows) > MAX_ITEMS:
        rows = [*rows[: MAX_ITEMS // 2], ("...", "", "", ""), *rows[-MAX_ITEMS // 2 :]]
    print_table(("step", "loss", "gradient norm", "time"), rows)
    if run.step_seconds is not None:
        echo(f"\n{seconds_text(run.step_seconds)} per step, {seconds_text(run.predicted_seconds)} predicted")
    if run.peaks:
        echo(f"peak per rank, measured: {', '.join(map(bytes_text, run.peaks))}")
    if run.largest_difference is not None:
        echo(f"largest difference to the unsplit model: {run.largest_difference:.1e}")
    if run.trace is not None:
        echo()
        _show_trace(run.trace)
