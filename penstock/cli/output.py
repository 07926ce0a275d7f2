"""Prints results, and turns errors into one message on stderr and an exit code."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from penstock.errors import CaptureError, CheckpointError, FitError, PartitionError, PenstockError, RunError

if TYPE_CHECKING:
    from penstock.views import RichView, Subject

BAD_INPUT = 2  # wrong usage, or a file with invalid contents
CANNOT_CUT = 3  # the model cannot be captured or cut into stages
DOES_NOT_FIT = 4  # no plan fits into the memory
RUN_FAILED = 5  # the work itself failed
BAD_CHECKPOINT = 6  # a checkpoint is damaged or belongs to another model
INTERRUPTED = 130

# Hints are written for Python ("ranks=2"); these arguments have a command-line option, most of the same name.
_FLAGS = {
    **{
        name: name
        for name in (
            "ranks",
            "microbatches",
            "stages_per_rank",
            "forward",
            "input_grad",
            "weight_grad",
            "latency",
            "overlap",
            "activation_bytes",
            "in_flight",
            "depth",
            "steps",
            "clip",
            "accumulate",
            "warmup",
            "eval_every",
        )
    },
    "budget_seconds": "budget",
    "basic_blocks": "block",
}
_KEYWORD = re.compile(rf"\b({'|'.join(_FLAGS)})=(\w[\w.]*)")
_BLOCKS = re.compile(r"\bbasic_blocks(=\[[^]]*\])?")


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Turn errors of a command into a message and an exit code; the only place that does so."""
    try:
        yield
    except (CaptureError, PartitionError) as error:
        raise failed(_with_flags(error), CANNOT_CUT) from None
    except FitError as error:
        raise failed(_with_flags(error), DOES_NOT_FIT) from None
    except RunError as error:
        raise failed(_with_flags(error), RUN_FAILED) from None
    except CheckpointError as error:
        raise failed(_with_flags(error), BAD_CHECKPOINT) from None
    except PenstockError as error:
        raise failed(_with_flags(error), BAD_INPUT) from None
    except BrokenPipeError:
        raise  # the reader of stdout is gone, as with `| head`: typer exits silently
    except OSError as error:
        file = f" (file: {error.filename})" if error.filename else ""
        raise failed(f"{(error.strerror or str(error)).lower()}{file}", RUN_FAILED) from None
    except KeyboardInterrupt:
        # Not `failed`: ctrl-c may have come while its imports were loading.
        typer.echo("interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from None


def failed(message: str, code: int) -> typer.Exit:
    """Print a message to stderr and return the exception that ends the command with the code."""
    from penstock.ir import printable

    typer.echo(printable(message), err=True)
    return typer.Exit(code)


def _with_flags(error: PenstockError) -> str:
    """The message, with Python arguments of the hint as options: `--stages-per-rank 2` for `stages_per_rank=2`."""
    hint = _KEYWORD.sub(lambda found: f"--{_FLAGS[found[1]].replace('_', '-')} {found[2]}", error.hint)
    hint = _BLOCKS.sub("--block NAME", hint)
    return str(error).removesuffix(error.hint) + hint


def print_view(view: "RichView[Subject]", subject: "Subject") -> None:
    """Print a view, in colour on a terminal and as plain text in a pipe."""
    from rich.console import Console

    console = Console()
    if console.is_terminal:
        console.print(view.renderable(subject))
    else:
        typer.echo(view(subject))


def print_table(header: tuple[str, ...], rows: "Sequence[tuple[str, ...]]") -> None:
    """Print a table; as Markdown in a pipe."""
    from rich.console import Console

    from penstock.views import TextTable

    console, table = Console(), TextTable(header, tuple(rows))
    if console.is_terminal:
        console.print(table.rich())
    else:
        typer.echo(table.markdown())


def print_json(value: object) -> None:
    """Print a value as indented JSON."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def note(text: str) -> None:
    """Print to stderr, so that a pipe receives the result alone."""
    typer.echo(text, err=True)
