"""Cache: profiles that were measured before, a file each, in a directory of the user's."""

import os
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path

from penstock.errors import FormatError
from penstock.ir import Profile, load_record, to_json

VARIABLE = "PENSTOCK_CACHE"
_MOST = 512
"""files; of more, those are removed that were used longest ago"""


class Cache:
    """Profiles by a key. Whatever is wrong with the directory costs no more than another measurement."""

    def __init__(self, directory: str | Path | None = None) -> None:
        self.directory = Path(directory) if directory is not None else users_directory()

    def get(self, key: str) -> Profile | None:
        """The profile of a key; one that cannot be read is not there, and is told of."""
        path = self._path(key)
        if not path.is_file():
            return None
        try:
            profile = load_record(path, Profile)
        except FormatError as error:
            warnings.warn(f"a cached profile is of no use, and is measured again: {error}", stacklevel=2)
            return None
        with suppress(OSError):
            os.utime(path)
        return profile

    def put(self, key: str, profile: Profile) -> None:
        """Keep a profile, readable by nobody else; a reader sees all of it or nothing."""
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, draft = tempfile.mkstemp(suffix=".draft", dir=self.directory)
            try:
                with open(handle, "w", encoding="utf-8") as file:
                    file.write(to_json(profile))
                Path(draft).replace(self._path(key))
            except BaseException:
                Path(draft).unlink(missing_ok=True)
                raise
            self._thin_out()
        except (OSError, FormatError) as error:
            warnings.warn(f"a profile is not kept for the next time: {error}", stacklevel=2)

    def clear(self) -> int:
        """Remove all profiles; how many there were."""
        found = self._files()
        for path in found:
            path.unlink(missing_ok=True)
        return len(found)

    def _thin_out(self) -> None:
        for path in sorted(self._files(), key=_last_use)[:-_MOST]:
            path.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        return sorted(self.directory.glob("*.json")) if self.directory.is_dir() else []

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}.json"


def users_directory() -> Path:
    """PENSTOCK_CACHE, or where programs keep what they can make again: XDG_CACHE_HOME, or .cache in the user's home."""
    if own := os.environ.get(VARIABLE):
        return Path(own)
    given = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(given) if os.path.isabs(given) else Path(os.path.expanduser("~")) / ".cache"
    return base / "penstock" / "profiles"


def _last_use(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
