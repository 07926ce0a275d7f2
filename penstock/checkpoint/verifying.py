"""Verifying: whether the files of a checkpoint are those that were written, each looked at by one rank."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from penstock.checkpoint.manifest import Manifest, opened
from penstock.errors import DamagedError

_AGAIN = "an earlier checkpoint; this one is not what was written"


def check_sizes(directory: Path, manifest: Manifest) -> None:
    """Refuse files that are missing, are links, or have another size; nothing is read."""
    for name, record in manifest.files.items():
        number = opened(directory / name)
        size = os.fstat(number).st_size
        os.close(number)
        if size != record.bytes:
            raise DamagedError(
                "a file has another size than was written",
                file=directory / name,
                bytes=size,
                written=record.bytes,
                hint=_AGAIN,
            )


def check_files(directory: Path, manifest: Manifest, names: Iterable[str]) -> int:
    """Refuse files whose bytes are not those that were written; how many bytes were looked at."""
    total = 0
    for name in names:
        try:
            with os.fdopen(opened(directory / name), "rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise DamagedError("a file cannot be read", file=directory / name, reason=error.strerror) from None
        if found != manifest.files[name].sha256:
            raise DamagedError("a file is not what was written", file=directory / name, hint=_AGAIN)
        total += manifest.files[name].bytes
    return total


def share_of(manifest: Manifest, rank: int, ranks: int) -> list[str]:
    """The files that one of some ranks looks at: what the same rank wrote, or about as many bytes as the others."""
    if manifest.plan.get("processes") == ranks:
        return [name for name, record in manifest.files.items() if record.rank % ranks == rank]
    loads = [0] * ranks
    own = []
    for name in sorted(manifest.files, key=lambda name: (-manifest.files[name].bytes, name)):
        least = loads.index(min(loads))
        loads[least] += manifest.files[name].bytes
        own += [name] if least == rank else []
    return own
