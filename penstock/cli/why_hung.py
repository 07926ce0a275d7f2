"""why-hung: what the ranks of a run did last, and which of them the others wait for."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument

from penstock.cli.options import AsJson
from penstock.cli.run_files import BOARD
from penstock.cli.screen import print_json
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.launch import RankStatus

Run = Annotated[Path, Argument(metavar="RUN", help="The directory that train was given as --out.")]


def why_hung(*, run: Run, as_json: AsJson = False) -> None:
    """Say who waits for whom.

    Every rank notes what it does in a small file, which outlives it. Those of one run are joined: who waits for what
    from whom, since when, and which rank did not move. It can be asked while the run goes on, and after it broke.
    """
    from penstock.launch import StatusFile, explain_hang

    statuses = StatusFile.read(run / BOARD)
    if not statuses:
        hint = "the directory of a run that is going on or broke: penstock train ... --out RUN"
        raise PenstockError("no rank has noted anything there", directory=run / BOARD, hint=hint)
    if as_json:
        print_json([_plain(status) for status in statuses])
    else:
        typer.echo(explain_hang(statuses, time.monotonic()))


def _plain(status: "RankStatus") -> dict[str, Any]:
    return {
        "rank": status.rank,
        "pid": status.pid,
        "process": status.process,
        "state": status.state,
        "step": status.step,
        "action": str(status.action),
        "peer": status.peer,
        "seconds": time.monotonic() - status.since,
        "failure": status.failure,
    }
