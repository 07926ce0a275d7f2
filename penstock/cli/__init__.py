"""The command `penstock`. A verb is in the file of its name; the other files are shared by verbs:

options.py           options of several verbs, and how the fields of a record become options
output.py            printing, and errors as a message and an exit code
files.py             reading records, and writing files completely or not at all
user_code.py         functions named FILE.py:FUNCTION
models.py            the model and the batch of a command; hf_models.py builds those named hf:NAME
plan.py              the verb, its options, and `make_plan` for `explain` and `train`
train.py             the verb, and which plan a training run follows
training_job.py      the flags of `train`, and what every rank runs
train_log.py         the printed steps, and the files in --out
restarts.py          restarts after a failure, and the directory of the checkpoints
demo_schedules.py    `demo --schedules`

A verb imports torch and the packages it needs when it runs, so that `penstock --help` answers at once.
"""

import signal
import warnings
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
    selftest,
    show,
    simulate,
    trace,
    train,
    what_if,
    why_hung,
)
from penstock.cli.options import command
from penstock.cli.output import exit_on_error, format_warning

__all__ = ["app", "main"]

app = typer.Typer(
    name="penstock",
    help="Plan, prove and predict pipeline-parallel training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help needs no rich, which is slow to import
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
for verb in (
    demo.demo,
    doctor.doctor,
    selftest.selftest,
    capture.capture,
    plan.plan,
    explain.explain,
    simulate.simulate,
    show.show,
    check.check,
    train.train,
    why_hung.why_hung,
    what_if.what_if,
    report.report,
    trace.trace,
):
    app.command()(command(verb))

checkpoints = typer.Typer(
    name="ckpt",
    help="List, verify, show and export checkpoints.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings=app.info.context_settings,
)
for verb in (ckpt.ls, ckpt.verify, ckpt.show, ckpt.export):
    checkpoints.command()(command(verb))
app.add_typer(checkpoints)


def _print_version(wanted: bool) -> None:
    if wanted:
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
    """Run the command line."""
    warnings.formatwarning = format_warning
    try:
        with exit_on_error():
            app(prog_name="penstock")
    except typer.Exit as end:  # raised outside of a verb
        raise SystemExit(end.exit_code) from None
    finally:
        # While libraries shut down, another ctrl-c must not print their tracebacks.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
