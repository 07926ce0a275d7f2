"""The command `penstock`: one file per verb, thin; a verb imports what it needs when it runs: help answers fast."""

import signal
from typing import Annotated

import typer

from penstock import __version__
from penstock.cli import (
    capture,
    check,
    ckpt,
    demo,
    doctor,
    explain,
    plan,
    report,
    show,
    simulate,
    trace,
    train,
    why_hung,
)
from penstock.cli.outcome import explained
from penstock.cli.records import flat

__all__ = ["app", "main"]

app = typer.Typer(
    name="penstock",
    help="Plan, prove and predict pipeline-parallel training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help needs no rich and reads the same in a file
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
for verb in (
    demo.demo,
    doctor.doctor,
    capture.capture,
    plan.plan,
    explain.explain,
    simulate.simulate,
    show.show,
    check.check,
    train.train,
    why_hung.why_hung,
    report.report,
    trace.trace,
):
    app.command()(flat(verb))

of_checkpoints = typer.Typer(
    name="ckpt",
    help="List, verify, show and export checkpoints.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings=app.info.context_settings,
)
for act in (ckpt.ls, ckpt.verify, ckpt.show, ckpt.export):
    of_checkpoints.command()(flat(act))
app.add_typer(of_checkpoints)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Plan, prove and predict pipeline-parallel training."""


def main() -> None:
    """What the installed command runs."""
    try:
        with explained():
            app(prog_name="penstock")
    except typer.Exit as end:  # of what happens outside a verb
        raise SystemExit(end.exit_code) from None
    finally:
        # All is said: one more ctrl-c, while libraries take their leave, ends the process without their tracebacks.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
