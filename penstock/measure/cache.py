"""A cache of measured profiles, and of the measured ranks of machines: one file each, in a directory of the user."""

import os
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from penstock.errors import FormatError, PenstockWarning
from penstock.ir import Cluster, Profile, load_record, to_json

CACHE_VARIABLE = "PENSTOCK_CACHE"
_Cached = TypeVar("_Cached", Profile, Cluster)
_MAX_FILES = 512
"""beyond that, the least recently used are removed"""


class Cache:
    """Profiles by key, or other records. One that cannot be read or written is a warning, and is measured again."""

    def __init__(self, directory: str | Path | None = None) -> None:
        self.directory = Path(directory) if directory is not None else default_directory()

    def get(self, key: str, kind: type[_Cached] = Profile) -> _Cached | None:
        """The record of a key; None, with a warning, if it cannot be read."""
        path = self._path(key)
        if not path.is_file():
            return None
        try:
            record = load_record(path, kind)
        except FormatError as error:
            warnings.warn(f"cannot read a cached profile, measuring again: {error}", PenstockWarning, stacklevel=2)
            return None
        with suppress(OSError):
            os.utime(path)
        return record

    def put(self, key: str, record: Profile | Cluster) -> None:
        """Store a record, readable by this user only; a reader never sees half of it."""
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(suffix=".temporary", dir=self.directory)
            try:
                with open(handle, "w", encoding="utf-8") as file:
                    file.write(to_json(record))
                Path(temporary).replace(self._path(key))
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise
            for path in sorted(self._files(), key=_last_used)[:-_MAX_FILES]:
                path.unlink(missing_ok=True)
        except (OSError, FormatError) as error:
            warnings.warn(f"cannot store a profile in the cache: {error}", PenstockWarning, stacklevel=2)

    def clear(self) -> int:
        """Remove all profiles; returns their number."""
        files = self._files()
        for path in files:
            path.unlink(missing_ok=True)
        return len(files)

    def _files(self) -> list[Path]:
        return sorted(self.directory.glob("*.json")) if self.directory.is_dir() else []

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}.json"


def default_directory() -> Path:
    """PENSTOCK_CACHE, else penstock/profiles in XDG_CACHE_HOME or in ~/.cache."""
    if directory := os.environ.get(CACHE_VARIABLE):
        return Path(directory)
    cache_home = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(cache_home) if os.path.isabs(cache_home) else Path(os.path.expanduser("~")) / ".cache"
    return base / "penstock" / "profiles"


def _last_used(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
