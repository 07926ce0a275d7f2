"""show: any noun from a file, in the terminal."""

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from penstock.cli.files import check_targets, read_noun, write
from penstock.cli.options import AsJson
from penstock.cli.runs import prove
from penstock.cli.screen import look, note, print_sheet
from penstock.errors import ScheduleError, ViewError

if TYPE_CHECKING:
    from penstock.ir import Program, Run, Schedule

File = Annotated[Path, Argument(metavar="FILE", help="JSON of any noun, or the CSV or text of a schedule or program.")]
ViewName = Annotated[str | None, Option("--view", metavar="NAME", help="The view to show.")]
Out = Annotated[Path | None, Option(metavar="FILE", help="Write the view here; .png draws timeline or memory as PNG.")]
MOST_SHOWN = 40
"""items of a list"""


def show(*, file: File, view: ViewName = None, out: Out = None, as_json: AsJson = False) -> None:
    """Show what a file holds, in the terminal.

    A schedule, program, trace, plan, graph, profile, run, costs, cluster, or any other noun. Orders are drawn as they
    run when every pass takes one second. With --json the noun is printed as a document that penstock reads: a CSV
    becomes JSON.

    With --view one view is shown instead. Of orders, traces, plans and runs: terminal, table, timeline, memory, chrome;
    of graphs, plans and runs: outline, cuts, model; of plans and runs: report; of profiles: profile.
    """
    from penstock.ir import Graph, Plan, Profile, Program, Run, Schedule, Trace, to_json
    from penstock.views import Outline
    from penstock.views import Profile as ProfileView

    check_targets((out,), source=file)
    noun = read_noun(file)
    if view or out:
        _show_view(noun, view or "", out)
    elif as_json:
        typer.echo(to_json(noun), nl=False)
    elif isinstance(noun, Schedule | Program):
        _show_orders(noun)
    elif isinstance(noun, Trace):
        _show_trace(noun)
    elif isinstance(noun, Plan):
        typer.echo(str(noun))
    elif isinstance(noun, Graph):
        look(Outline(), noun)
    elif isinstance(noun, Run):
        _show_run(noun)
    elif isinstance(noun, Profile):
        look(ProfileView(), noun)
    else:
        _show_record(noun)


def _show_view(noun: Any, name: str, out: Path | None) -> None:
    """Print a view of the table on the terminal, or write it to the file."""
    from penstock.views import VIEWS, RichView

    if name not in VIEWS:
        raise ViewError("unknown view", view=repr(name), hint=f"--view with one of {', '.join(VIEWS)}")
    has_formats = any(field.name == "format" for field in fields(VIEWS[name]))
    view = VIEWS[name](**({"format": "png"} if has_formats and out and out.suffix.lower() == ".png" else {}))
    subject = _subject(noun, view.noun)
    if out:
        write(out, view(subject))
        note(f"wrote {out}")
    elif isinstance(view, RichView):
        look(view, subject)
    else:
        typer.echo(view(subject))


def _subject(noun: Any, wanted: type) -> Any:
    """The subject of a view of `wanted` records that a noun contains or leads to."""
    import penstock
    from penstock.ir import Graph, Plan, Program, Run, Schedule, Trace

    plan = noun.plan if isinstance(noun, Run) else noun
    if wanted is Trace and isinstance(noun, Run):
        traces = {"predicted": penstock.simulate(plan), "measured": noun.trace}
        return {name: trace for name, trace in traces.items() if trace is not None}
    if wanted is Trace and isinstance(noun, Schedule | Program):
        prove(noun)
    if wanted is Trace and isinstance(noun, Schedule | Program | Plan):
        return penstock.simulate(noun)
    if wanted is Graph and isinstance(plan, Plan):
        return plan.graph, plan.partition
    if wanted is Plan and isinstance(plan, Plan):
        from penstock.api.reporting import contents_of

        return contents_of(noun)
    if not isinstance(noun, wanted):
        got, hint = type(noun).__name__, f"a file with a {wanted.__name__.lower()}"
        raise ViewError(f"this view needs a {wanted.__name__.lower()}", got=got, hint=hint)
    return noun


def _show_orders(orders: "Schedule | Program") -> None:
    import penstock

    typer.echo(described(orders))
    try:
        prove(orders)
    except ScheduleError as error:
        typer.echo(f"{orders}\n\nthe proof refuses these orders: {error}")
    else:
        _show_trace(penstock.simulate(orders))


def described(orders: "Schedule | Program") -> str:
    """The noun and its sizes in one line."""
    return (
        f"{type(orders).__name__}: {orders.num_ranks} ranks, {orders.num_stages} stages, "
        f"{orders.num_microbatches} microbatches, {len(orders.table.codes)} actions"
    )


def _show_trace(trace: Any) -> None:
    from penstock.views import Table, Terminal

    look(Terminal(color=False), trace)
    look(Table(), {"trace": trace})


def _show_run(run: "Run") -> None:
    """The plan, how training went, and the last step that was recorded."""
    from penstock.ir import bytes_text, seconds_text

    typer.echo(f"{run.plan}\n")
    rows = [(str(f.step), _figure(f.loss), _figure(f.grad_norm), seconds_text(f.seconds)) for f in run.steps]
    if len(rows) > MOST_SHOWN:
        rows = [*rows[: MOST_SHOWN // 2], ("...", "", "", ""), *rows[-MOST_SHOWN // 2 :]]
    print_sheet(("step", "loss", "gradient norm", "time"), rows)
    if run.step_seconds is not None:
        predicted = seconds_text(run.plan.predicted.makespan)
        typer.echo(f"\n{seconds_text(run.step_seconds)} per step, {predicted} predicted")
    if run.peaks:
        typer.echo(f"peak per rank, measured: {', '.join(map(bytes_text, run.peaks))}")
    if run.largest_difference is not None:
        typer.echo(f"largest difference to the unsplit model: {run.largest_difference:.1e}")
    if run.trace is not None:
        typer.echo()
        _show_trace(run.trace)


def _figure(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.6g}"


def _show_record(noun: Any) -> None:
    from rich.console import Console
    from rich.pretty import Pretty

    Console().print(Pretty(noun, max_length=MOST_SHOWN, expand_all=True))
