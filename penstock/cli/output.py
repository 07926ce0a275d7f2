"""Prints results, and turns errors into one message on stderr and an exit code."""

import errno
import json
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import IO, TYPE_CHECKING

import typer

from penstock.api.train_options import TrainOptions
from penstock.errors import (
    CaptureError,
    CheckpointError,
    FitError,
    PartitionError,
    PenstockError,
    PenstockWarning,
    RunError,
)

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from penstock.views import RichView, Subject

BAD_INPUT = 2  # wrong usage, or a file with invalid contents
CANNOT_CUT = 3  # the model cannot be captured or cut into stages
DOES_NOT_FIT = 4  # no plan fits into the memory
RUN_FAILED = 5  # the work itself failed
BAD_CHECKPOINT = 6  # a checkpoint is damaged or belongs to another model
INTERRUPTED = 130
_PYTHON_FORMAT = warnings.formatwarning
_MAX_MESSAGE = 20_000  # of a longer message, such as an error of the user's code, the middle is left out

# Hints are written for Python ("ranks=2"); these arguments have a command-line option, most of the same name.
_FLAGS = {
    **{field.name: field.name for field in fields(TrainOptions)},
    **{name: name for name in ("ranks", "microbatches", "stages_per_rank", "in_flight", "depth", "recompute")},
    **{name: name for name in ("schedule", "partitioner", "memory", "vocabulary_shards", "devices", "tensor_parallel")},
    **{name: name for name in ("shard_optimizer", "sequence_parallel", "overlap_collectives")},
    **{name: name for name in ("forward", "input_grad", "weight_grad", "latency", "overlap", "activation_bytes")},
    "budget_seconds": "budget",
    "basic_blocks": "block",
}
_KEYWORD = re.compile(rf"\b({'|'.join(_FLAGS)})=(\"?)(\w[\w.]*)\2")
_SLOWNESS = re.compile(r"\bslowness=\(([^)]*)\)")
_BLOCKS = re.compile(r"\bbasic_blocks(=\[[^]]*\])?")
_TEXTS = {
    "or None": "or leave it out",
    "loss_fn=...": "--loss NAME",
    "a target of the loss function is given by name: pipe.step(x, target=y)": (
        "--loss NAME, if a batch is a pair of inputs and target"
    ),
    "pipe.load(directory), where save_pretrained wrote, or pipe.load_state_dict(state)": (
        "--weights, for random weights of an hf: model; for others FILE.py:FUNCTION that returns a model with weights"
    ),
    ', or inputs="first"': "",
}


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Turn errors of a command into a message and an exit code; the only place that does so."""
    try:
        yield
    except (CaptureError, PartitionError) as error:
        raise failed(_message(error), CANNOT_CUT) from None
    except FitError as error:
        raise failed(_message(error), DOES_NOT_FIT) from None
    except RunError as error:
        raise failed(_message(error), RUN_FAILED) from None
    except CheckpointError as error:
        raise failed(_message(error), BAD_CHECKPOINT) from None
    except PenstockError as error:
        raise failed(_message(error), BAD_INPUT) from None
    except BrokenPipeError:
        raise  # the reader of stdout is gone, as with `| head`: typer exits silently
    except OSError as error:
        file = f" (file: {error.filename})" if error.filename else ""
        code = BAD_INPUT if error.errno == errno.ENAMETOOLONG else RUN_FAILED
        raise failed(f"{(error.strerror or str(error)).lower()}{file}", code) from None
    except KeyboardInterrupt:
        # Not `failed`: ctrl-c may have come while its imports were loading.
        typer.echo("interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from None


def failed(message: str, code: int) -> typer.Exit:
    """Print a message to stderr and return the exception that ends the command with the code."""
    if len(message) > _MAX_MESSAGE:
        half = _MAX_MESSAGE // 2
        message = f"{message[:half]}\n  [...]\n{message[-half:]}"
    echo(message, err=True)
    return typer.Exit(code)


def _message(error: PenstockError) -> str:
    """The message, with the hint for the command line."""
    return str(error).removesuffix(error.hint) + with_flags(error.hint)


def with_flags(hint: str) -> str:
    """A hint with Python arguments as options: `--stages-per-rank 2` for `stages_per_rank=2`."""
    hint = _KEYWORD.sub(_flag, hint)
    hint = _SLOWNESS.sub(lambda found: f"--slowness {found[1].replace(', ', ',')}", hint)
    hint = _BLOCKS.sub("--block NAME", hint)
    for text, replaced in _TEXTS.items():
        hint = hint.replace(text, replaced)
    return hint


def _flag(found: "re.Match[str]") -> str:
    name, value = f"--{_FLAGS[found[1]].replace('_', '-')}", found[3]
    return {"None": f"no {name}", "True": name}.get(value, f"{name} {value}")


def echo(text: str = "", *, end: str = "\n", file: "IO[str] | None" = None, err: bool = False) -> None:
    """Print a text that may contain names from files, without characters that control a terminal."""
    from penstock.ir import printable

    typer.echo(printable(text) + end, file=file, nl=False, err=err)


def print_view(view: "RichView[Subject]", subject: "Subject") -> None:
    """Print a view, in colour on a terminal and as plain text in a pipe."""
    from rich.console import Console

    console = Console()
    if console.is_terminal:
        print_rich(console, view.renderable(subject))
    else:
        # The codes of colours, which only a terminal shows.
        echo(re.sub(r"\x1b\[[0-9;]*m", "", view(subject)))


def print_table(header: tuple[str, ...], rows: "Sequence[tuple[str, ...]]") -> None:
    """Print a table; as Markdown in a pipe."""
    from rich.console import Console

    from penstock.ir import printable
    from penstock.views import TextTable

    # A name must not break a line of the table either.
    clean = tuple(tuple(printable(cell, one_line=True) for cell in row) for row in rows)
    console, table = Console(), TextTable(header, clean)
    if console.is_terminal:
        print_rich(console, table.rich())
    else:
        echo(table.markdown())


def print_rich(console: "Console", renderable: "RenderableType") -> None:
    """Print on a console; colours are its own, and texts have no characters that control a terminal."""
    from rich.segment import Segment, Segments

    from penstock.ir import printable

    segments = console.render(renderable)
    clean = [each if each.control else Segment(printable(each.text), each.style) for each in segments]
    console.print(Segments(clean), end="")


def print_json(value: object) -> None:
    echo(json.dumps(value, indent=2, allow_nan=False))


def format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning of penstock without the line of code that Python adds, which is never a line of the user's."""
    if issubclass(category, PenstockWarning):
        return f"warning: {message}\n"
    return _PYTHON_FORMAT(message, category, filename, lineno, line)


def note(text: str) -> None:
    """Print to stderr, so that a pipe receives the result alone."""
    echo(text, err=True)
