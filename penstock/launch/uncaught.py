"""Prints an uncaught error of a rank without frames of penstock and torch, and in full on one rank if all raise it.

Without it, under torchrun every rank prints its whole traceback.
"""

import contextlib
import os
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import TextIO

import torch

from penstock.errors import PenstockError
from penstock.ir import printable

FULL_VARIABLE = "PENSTOCK_FULL_TRACEBACK"
"""environment variable: if set, errors are printed by every rank and with all frames"""
_OWN = str(Path(__file__).parents[1]) + os.sep
_INTERNAL = (_OWN, str(Path(torch.__file__).parent) + os.sep, contextlib.__file__)


class ErrorPrinter:
    """Replaces `sys.excepthook` in a rank for errors of penstock; other errors are printed as before."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._before = sys.excepthook

    @classmethod
    def install(cls, rank: int) -> None:
        """Print the uncaught errors of this process, which is a rank."""
        if isinstance(sys.excepthook, cls):
            sys.excepthook.rank = rank
        else:
            sys.excepthook = cls(rank)

    def __call__(
        self, kind: type[BaseException], error: BaseException, frames: TracebackType | None, file: TextIO | None = None
    ) -> None:
        """Print an error."""
        if not isinstance(error, PenstockError) or os.environ.get(FULL_VARIABLE):
            self._before(kind, error, frames)
            return
        if error.is_shared and (self.rank > 0 if error.repeats is None else error.repeats):
            first = error.values.get("rank", 0)
            text = f"{kind.__name__}: {error.problem} (every rank has this error: see rank {first})"
        else:
            text = "".join(_shortened(traceback.TracebackException(kind, error, frames)).format())
        text = printable(text)
        # In one piece: other ranks write to the same terminal.
        (file or sys.stderr).write("".join(f"[rank{self.rank}]: {line}\n" for line in text.splitlines()))


def _shortened(report: traceback.TracebackException) -> traceback.TracebackException:
    """Remove internal frames from the report and those of its causes, but not if they show a bug of penstock."""
    is_ours = report.exc_type is not None and issubclass(report.exc_type, PenstockError)
    if is_ours or (report.stack and not report.stack[-1].filename.startswith(_OWN)):
        kept = [frame for frame in report.stack if not frame.filename.startswith(_INTERNAL)]
        report.stack = traceback.StackSummary.from_list(kept)
    for cause in (report.__cause__, report.__context__):
        if cause is not None:
            _shortened(cause)
    return report
