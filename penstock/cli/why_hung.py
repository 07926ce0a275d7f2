"""`penstock why-hung`: the last actions of the ranks of a run, and which rank the others wait for."""

import time
from pathlib import Path
from typing import Annotated

from typer import Argument

from penstock.cli.options import AsJson
from penstock.cli.output import echo, print_json
from penstock.cli.train_log import STATUS
from penstock.errors import PenstockError

Run = Annotated[Path, Argument(metavar="RUN", help="The --out directory of the training run.")]


def why_hung(*, run: Run, as_json: AsJson = False) -> None:
    """Show which rank waits for which.

    Every rank keeps its current action in a small file that outlives it. Shows for each rank what it waits for, from
    which rank, since when, and which rank made no progress. Works while the run is running and after it failed.
    """
    from penstock.launch import StatusFile, explain_hang

    statuses = StatusFile.read(run / STATUS)
    if not statuses:
        hint = "the directory of a run that is running or failed: penstock train ... --out RUN"
        raise PenstockError("no status files in the directory", directory=run / STATUS, hint=hint)
    if not as_json:
        echo(explain_hang(statuses, time.monotonic()))
        return
    print_json(
        [
            {
                "rank": status.rank,
                "pid": status.pid,
                "process": status.process,
                "state": status.state,
                "step": status.now.step,
                "action": status.now.action,
                "peer": status.now.peer,
                "seconds": time.monotonic() - status.now.since,
                "failure": status.failure,
            }
            for status in statuses
        ]
    )
