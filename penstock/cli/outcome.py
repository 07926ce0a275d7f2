"""Outcome: what a command ends with; a user's mistake is one message on stderr and an exit code, never a traceback."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

import typer

from penstock.cli.options import Sizes, Times
from penstock.errors import CaptureError, CheckpointError, FitError, PartitionError, PenstockError, RunError

BAD_INPUT = 2
"""wrong usage, or a file that does not say what it should"""
CANNOT_CUT = 3
"""the model cannot be captured or cut"""
DOES_NOT_FIT = 4
"""no plan keeps within the memory"""
RUN_FAILED = 5
"""the work itself could not be done"""
BAD_CHECKPOINT = 6
"""files that do not hold a model's numbers, or not what was written"""
INTERRUPTED = 130
FLAGS = {
    **{field.name: field.name for record in (Sizes, Times) for field in fields(record)},
    "in_flight": "in_flight",
    "depth": "depth",
    "budget_seconds": "budget",
    "basic_blocks": "block",
}
"""by the name that Python users give, the option of the command"""
_KEYWORD = re.compile(rf"\b({'|'.join(FLAGS)})=(\w[\w.]*)")


@contextmanager
def explained() -> Iterator[None]:
    """The one place where errors of a command become a message and an exit code."""
    try:
        yield
    except (CaptureError, PartitionError) as error:
        raise failed(_in_flags(error), CANNOT_CUT) from None
    except FitError as error:
        raise failed(_in_flags(error), DOES_NOT_FIT) from None
    except RunError as error:
        raise failed(_in_flags(error), RUN_FAILED) from None
    except CheckpointError as error:
        raise failed(_in_flags(error), BAD_CHECKPOINT) from None
    except PenstockError as error:
        raise failed(_in_flags(error), BAD_INPUT) from None
    except BrokenPipeError:
        raise  # the reader of our output went away, as `head` does: typer ends without a word
    except OSError as error:
        raise failed(_spelled(error), RUN_FAILED) from None
    except KeyboardInterrupt:
        raise failed("interrupted", INTERRUPTED) from None


def failed(message: str, code: int) -> typer.Exit:
    """The end of a command with a message on stderr."""
    from penstock.ir import printable

    typer.echo(printable(message), err=True)
    return typer.Exit(code)


def _in_flags(error: PenstockError) -> str:
    """The message, with what to try as it is typed in a shell: `--stages-per-rank 2` for `stages_per_rank=2`."""
    hint = _KEYWORD.sub(lambda found: f"--{FLAGS[found[1]].replace('_', '-')} {found[2]}", error.hint)
    return str(error).removesuffix(error.hint) + hint


def _spelled(error: OSError) -> str:
    where = f" (file: {error.filename})" if error.filename else ""
    return f"{(error.strerror or str(error)).lower()}{where}"
