"""Listing: the checkpoints of a directory, and whether they are good, as far as one looks."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from penstock.checkpoint import shelf
from penstock.checkpoint.directory import candidates
from penstock.checkpoint.stored import Stored
from penstock.errors import CheckpointError
from penstock.ir import bytes_text

GOOD, HALF = "whole", "half written"


class Entry(NamedTuple):
    """A checkpoint in one line."""

    name: str
    written: str = ""
    bytes: int = 0
    ranks: int = 0
    schedule: str = ""
    state: str = HALF

    @property
    def row(self) -> tuple[str, ...]:
        """As a table shows it."""
        known = (self.written, bytes_text(self.bytes), str(self.ranks), self.schedule) if self.written else ("",) * 4
        return (self.name, *known, self.state)


class Verified(NamedTuple):
    """What came of looking at all bytes of a checkpoint."""

    name: str
    files: int
    bytes: int
    problem: str


def listing(path: Path) -> Iterator[Entry]:
    """The checkpoints of a directory, the newest first, and then what saves that never ended have left."""
    found = candidates(path)
    for directory in found:
        yield _entry(directory)
    if found != [path]:
        for left in sorted(path.iterdir()):
            if left.name.startswith(f"{shelf.DRAFT}step-"):
                yield Entry(left.name)


def verified(path: Path) -> Iterator[Verified]:
    """All files of all checkpoints compared with their digests, the newest first."""
    for directory in candidates(path):
        try:
            with Stored(directory) as stored:
                total = stored.verify()
                yield Verified(directory.name, len(stored.manifest.files), total, "")
        except CheckpointError as error:
            yield Verified(directory.name, 0, 0, str(error).splitlines()[0])


def _entry(directory: Path) -> Entry:
    try:
        with Stored(directory) as stored:
            manifest = stored.manifest
    except CheckpointError as error:
        return Entry(directory.name, state=str(error).splitlines()[0])
    plan = manifest.plan
    return Entry(
        directory.name, manifest.written, manifest.total_bytes, int(plan["ranks"]), str(plan["schedule"]), GOOD
    )
