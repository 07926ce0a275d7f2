"""Outcome: what a command ends with; a user's mistake is one message on stderr and an exit code, never a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from penstock.errors import CaptureError, PartitionError, PenstockError

BAD_INPUT = 2
"""wrong usage, or a file that does not say what it should"""
CANNOT_CUT = 3
"""the model cannot be captured or cut"""
RUN_FAILED = 5
"""the work itself could not be done"""
INTERRUPTED = 130


@contextmanager
def explained() -> Iterator[None]:
    """The one place where errors of a command become a message and an exit code."""
    try:
        yield
    except (CaptureError, PartitionError) as error:
        raise failed(str(error), CANNOT_CUT) from None
    except PenstockError as error:
        raise failed(str(error), BAD_INPUT) from None
    except BrokenPipeError:
        raise  # the reader of our output went away, as `head` does: typer ends without a word
    except OSError as error:
        raise failed(_spelled(error), RUN_FAILED) from None
    except KeyboardInterrupt:
        raise failed("interrupted", INTERRUPTED) from None


def failed(message: str, code: int) -> typer.Exit:
    """The end of a command with a message on stderr."""
    typer.echo(message, err=True)
    return typer.Exit(code)


def _spelled(error: OSError) -> str:
    where = f" (file: {error.filename})" if error.filename else ""
    return f"{(error.strerror or str(error)).lower()}{where}"
