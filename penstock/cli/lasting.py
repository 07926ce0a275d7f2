"""How a training lasts: where it is saved, from where it goes on, and how often it is taken up again."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from typer import Option

from penstock.cli.changes import WISHES
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.api.keeping import Keeping
    from penstock.ir import Plan
    from penstock.launch import RestartPolicy

AUTO = "auto"
_PATIENCE_SECONDS = 10.0
"""how long ranks of a command that was killed may take to end"""
_LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class Lasting:
    """What survives, and how."""

    checkpoint: Annotated[
        Path | None, Option(metavar="DIRECTORY", help="Save there: on the way, at the end, and when asked to stop.")
    ] = None
    every: Annotated[int, Option(min=1, metavar="N", help="Steps between two checkpoints.")] = 100
    keep: Annotated[int, Option(min=1, metavar="N", help="How many of the newest checkpoints stay.")] = 3
    asynchronous: Annotated[bool, Option("--asynchronous", help="Write checkpoints while training goes on.")] = False
    resume: Annotated[
        str | None, Option(metavar="WHERE", help='A checkpoint to go on from, or "auto": the newest good one, if any.')
    ] = None
    restarts: Annotated[
        int, Option(min=0, metavar="N", help="How often it is taken up again from its checkpoints if a rank breaks.")
    ] = 3
    min_ranks: Annotated[
        int | None, Option(min=1, metavar="K", help="Go on with so few ranks, by a new plan, if one is gone for good.")
    ] = None
    fault: Annotated[
        list[str] | None,
        Option(metavar="FAULT", help="Break on purpose, such as kill,rank=1,step=5; needs PENSTOCK_ALLOW_FAULTS=1."),
    ] = None

    @property
    def endurance(self) -> "RestartPolicy":
        """How much the run takes; without checkpoints there is nothing to take it up from."""
        from penstock.launch import RestartPolicy

        return RestartPolicy(self.restarts if self.checkpoint else 0, self.min_ranks)

    def keeping(self, life: int) -> "Keeping | None":
        """What a rank keeps, and where it goes on: after a restart always from what is there."""
        from penstock.api.keeping import Keeping

        if self.checkpoint is None:
            return None
        return Keeping(self.checkpoint, self.every, self.keep, self.source(life), self.asynchronous)

    def source(self, life: int = 0) -> Path | None:
        """What to go on from; None if there is nothing yet."""
        from penstock.checkpoint import is_shelf

        assert self.checkpoint is not None
        has_begun = is_shelf(self.checkpoint)
        if has_begun and (life or self.resume == AUTO):
            return self.checkpoint
        return None if self.resume in (None, AUTO) else Path(str(self.resume))


def check_lasting(lasting: Lasting, ranks: int | None, life: int) -> None:
    """Refuse what cannot be, before work is spent; make the directory."""
    from penstock.launch import parse_faults

    if lasting.checkpoint is None:
        names = ("resume", "min_ranks", "every", "keep", "asynchronous", "restarts")
        given = [name for name in names if getattr(lasting, name) != getattr(Lasting, name)]
        if given:
            flag = f"--{given[0].replace('_', '-')}"
            raise PenstockError(f"{flag} needs checkpoints", hint=f"--checkpoint DIRECTORY {flag} ...")
    else:
        _check_directory(lasting.checkpoint, AUTO if life else lasting.resume)
    if lasting.min_ranks is not None and ranks is not None and lasting.min_ranks > ranks:
        raise too_few(ranks, lasting.min_ranks)
    parse_faults(lasting.fault or ())


def too_few(ranks: int, min_ranks: int) -> PenstockError:
    """What is said where fewer ranks are planned than are to be left."""
    hint = f"--min-ranks {ranks} or less"
    return PenstockError("fewer ranks are planned than are to be left", ranks=ranks, min_ranks=min_ranks, hint=hint)


def _check_directory(directory: Path, resume: str | None) -> None:
    from penstock.checkpoint import candidates, is_checkpoint, is_shelf, make_root, steps

    if directory.exists() and not directory.is_dir():
        raise PenstockError("a file stands where the checkpoints should go", checkpoint=directory, hint="another name")
    if is_checkpoint(directory):
        hint = f"--checkpoint {directory.parent} --resume {directory}"
        raise PenstockError("that is a checkpoint, not a directory of them", checkpoint=directory, hint=hint)
    make_root(directory)
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PenstockError("nothing can be written there", checkpoint=directory, hint="another directory")
    if resume is None and is_shelf(directory):
        newest = steps(directory)[0].name
        hint = "--resume auto to go on, or another directory"
        raise PenstockError("an earlier training was saved there", checkpoint=directory, newest=newest, hint=hint)
    if resume not in (None, AUTO):
        if not Path(str(resume)).exists():
            hint = "--resume auto, or the path of a checkpoint"
            raise PenstockError("there is nothing to go on from", resume=resume, hint=hint)
        _check_branch(directory, candidates(Path(str(resume)))[0])


def _check_branch(directory: Path, source: Path) -> None:
    """Refuse to mix two trainings: after a break the newest checkpoint counts, whichever of them wrote it."""
    from penstock.checkpoint import step_of, steps

    newest = next(iter(steps(directory)), None)
    if newest is not None and (step_of(newest) or 0) > (step_of(source) or 0):
        hint = "--resume auto, or another directory for the checkpoints"
        raise PenstockError("newer checkpoints stand there already", newest=newest, resume=source, hint=hint)


@contextmanager
def held(directory: Path | None) -> Iterator[None]:
    """Inside, no other training saves into a directory; refused if one does."""
    if directory is None:
        yield
        return
    number = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(number, directory)
        yield
    finally:
        os.close(number)


def _lock(number: int, directory: Path) -> None:
    end = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                hint = "another directory, or end the other one"
                raise PenstockError("another training saves there", checkpoint=directory, hint=hint) from None
            time.sleep(_LOOK_SECONDS)
        except OSError:
            return  # a file system without locks


class SavedPlan(NamedTuple):
    """The plan by which a training was saved, and what was wished of it."""

    plan: "Plan"
    wishes: Any


def plan_of(source: Path | None) -> SavedPlan | None:
    """That of the newest checkpoint that can be read."""
    from penstock.checkpoint import PLAN, RUN, Stored, candidates, check_files
    from penstock.errors import CheckpointError
    from penstock.ir import Plan, from_json

    for directory in candidates(source) if source is not None else ():
        try:
            with Stored(directory) as stored:
                files = stored.manifest.files
                check_files(directory, stored.manifest, [name for name in files if name.startswith((PLAN, f"{RUN}."))])
                extra = stored.run.get("extra")
                plan = from_json(stored.text(PLAN).decode(), Plan)
        except (CheckpointError, KeyError):
            continue  # the ranks say what is wrong with it, and pass it over
        return SavedPlan(plan, extra.get(WISHES) if isinstance(extra, dict) else None)
    return None
