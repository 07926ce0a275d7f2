"""Leftovers: processes and temporary files that outlive what made them."""

from pathlib import Path


def left_over(scratch: Path, *directories: Path) -> list[str]:
    """The files that are left where nothing should be, and who works in directories in which nobody should."""
    places = {path.resolve() for path in directories}
    return [*map(str, sorted(scratch.rglob("penstock-*"))), *(f"process {pid}" for pid in _working_in(places))]


def _working_in(directories: set[Path]) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").resolve() in directories:
                found.append(process.name)
        except OSError:  # it has ended by now, or is another user's
            continue
    return found
