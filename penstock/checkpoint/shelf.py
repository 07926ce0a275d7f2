"""Shelf: the directory in which the checkpoints of a training stand, one for each step that was saved."""

import fcntl
import os
import re
import shutil
from pathlib import Path

from penstock.checkpoint.manifest import NAME, read_manifest
from penstock.errors import CheckpointError

DRAFT, REPLACED, DISCARDED = ".draft-", ".replaced-", ".discarded-"
_STEP = re.compile(r"step-(\d{6,18})")


def name_of(step: int) -> str:
    """The name of the checkpoint of a step."""
    return f"step-{step:06d}"


def step_of(directory: Path) -> int | None:
    """The step of a directory by its name."""
    found = _STEP.fullmatch(directory.name)
    return int(found[1]) if found else None


def steps(root: Path) -> list[Path]:
    """The checkpoints, the newest first; links are none."""
    found = [path for path in root.iterdir() if step_of(path) is not None and path.is_dir() and not path.is_symlink()]
    return sorted(found, key=lambda path: (step_of(path), path.name), reverse=True)


def is_shelf(root: Path) -> bool:
    """Whether checkpoints stand here."""
    return root.is_dir() and bool(steps(root))


def is_checkpoint(directory: Path) -> bool:
    """Whether this is a checkpoint itself, whole or not."""
    return (directory / NAME).is_file() or step_of(directory) is not None


def locked(directory: Path) -> int | None:
    """Hold a directory as long as this process lives; None if another does."""
    number = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(number)
        return None
    return number


def tidy(root: Path) -> list[str]:
    """Clear away what saves that never ended have left, but nothing that a process still writes; what that was."""
    cleared = []
    for path in sorted(root.iterdir()):
        if path.is_symlink() or not path.is_dir():
            continue
        if path.name.startswith(f"{REPLACED}step-"):
            _put_back(path)
        if (
            path.name.startswith((f"{DRAFT}step-", f"{DISCARDED}step-", f"{DISCARDED}replaced-step-"))
            and (lock := locked(path)) is not None
        ):
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
            cleared.append(path.name)
    return cleared


def _put_back(path: Path) -> None:
    """Between two renames the process ended: the older checkpoint counts."""
    place = path.with_name(path.name.removeprefix(REPLACED))
    if place.exists():
        discard(path)
    else:
        path.rename(place)


def discard(directory: Path) -> None:
    """Take a checkpoint away, or what has its name; it is none from the first moment on."""
    away = directory.with_name(f"{DISCARDED}{directory.name.lstrip('.')}.{os.getpid()}")
    directory.rename(away)
    if away.is_symlink() or away.is_file():
        away.unlink()
    else:
        shutil.rmtree(away, ignore_errors=True)


def put_in_place(draft: Path, place: Path) -> None:
    """Give what was written its name; what had the name before stays until then."""
    older = place.with_name(f"{REPLACED}{place.name}")
    if os.path.lexists(place):
        place.rename(older)
    draft.rename(place)
    sync(place.parent)
    if os.path.lexists(older):
        discard(older)


def prune(root: Path, keep: int, newest: Path) -> list[str]:
    """Of those before the newest, discard what is not good, and all but so many that are."""
    kept, gone = 1, []
    for path in steps(root):
        if (step_of(path) or 0) >= (step_of(newest) or 0):
            continue  # itself, or another training's
        if kept < keep and is_good(path):
            kept += 1
        else:
            discard(path)
            gone.append(path.name)
    return gone


def make_root(root: Path) -> None:
    """Make the directory of checkpoints and those around it, as far as they are missing; only the owner may enter."""
    for place in reversed((root, *root.parents)):
        if not place.exists():
            place.mkdir(mode=0o700, exist_ok=True)


def is_good(path: Path) -> bool:
    """As far as can be seen without reading its files."""
    try:
        read_manifest(path)
    except (CheckpointError, OSError):
        return False
    return True


def sync(directory: Path) -> None:
    """Wait until the disk knows the names in a directory."""
    number = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
