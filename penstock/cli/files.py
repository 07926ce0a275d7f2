"""Reads records from files, and writes files completely or not at all."""

import gzip
import os
from collections.abc import Iterable
from difflib import get_close_matches
from itertools import combinations
from pathlib import Path
from typing import Any

from penstock.errors import FormatError, PenstockError, ViewError

_ORDER_SUFFIXES = (".csv", ".txt", "")
_WRITTEN = "JSON that penstock wrote, or an order in a file that ends in .csv"


def read_record(path: Path) -> Any:
    """Read the record of a JSON file, or the Schedule or Program of a CSV or text file."""
    from penstock.ir import MAX_JSON_BYTES, from_json, read_schedule

    try:
        if (size := path.stat().st_size) > MAX_JSON_BYTES:
            raise FormatError("the file is too large", file=path, bytes=size, limit=MAX_JSON_BYTES)
        # Only once: a pipe, such as /dev/stdin, cannot be read again.
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise FormatError("cannot read the file", file=path, reason=reason, hint=_suggest(path)) from None
    except UnicodeDecodeError as error:
        raise FormatError("expected JSON or an order", file=path, reason=error, hint=_WRITTEN) from None
    is_json = text.lstrip().startswith("{")
    if not is_json and path.suffix.lower() not in _ORDER_SUFFIXES:
        raise FormatError("expected JSON or an order", file=path, hint=_WRITTEN)
    try:
        # A line break, because text of one line could be the name of a file.
        return from_json(text) if is_json else read_schedule(f"{text}\n")
    except PenstockError as error:
        hint = error.hint or ("a complete, unchanged file that penstock wrote" if is_json else "")
        raise FormatError(error.problem, report=error.report, hint=hint, **{"file": path, **error.values}) from None


def _suggest(path: Path) -> str:
    """A path that was probably meant instead of one that cannot be read."""
    if ":" in path.name and not path.exists():
        return f"the file of a plan; models are for penstock plan {path}, and for check PLAN --model {path}"
    if path.is_dir():
        return f"a file in it, such as {path / 'plan.json'}"
    names = sorted(each.name for each in path.parent.iterdir() if each.is_file()) if path.parent.is_dir() else []
    close = get_close_matches(path.name, names, n=1)
    return f"did you mean {path.parent / close[0]}?" if close else ""


def write(path: Path, document: str | bytes) -> None:
    """Write a file, compressed if the name ends in `.gz`; an existing file stays intact until it is replaced."""
    from penstock.ir import replace_file

    content = document.encode() if isinstance(document, str) else document
    if path.suffix == ".gz":
        content = gzip.compress(content, mtime=0)  # without a timestamp, equal traces give equal files
    check_target(path)
    try:
        # A link stays, and the file that it leads to is replaced; a device or pipe may have no other path.
        replace_file(path if path.exists() and not path.is_file() else path.resolve(), content)
    except OSError as error:
        # Name the user's file, not the temporary one.
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None


def check_targets(targets: Iterable[Path | None], source: Path | None = None) -> None:
    """Refuse targets that cannot be written, that are the same file twice, or that are the source."""
    paths = [path for path in targets if path is not None]
    for path in paths:
        check_target(path)
    if source is not None and any(_same_file(path, source) for path in paths):
        raise PenstockError("the output would overwrite its input", file=source, hint="another name")
    if twice := next((first for first, second in combinations(paths, 2) if _same_file(first, second)), None):
        raise PenstockError("two outputs must not be the same file", file=twice, hint="a name for each")


def check_picture(path: Path | None, *endings: str) -> None:
    """Refuse a file whose name ends like another format; one without an ending, such as a device, gets the first."""
    if path is None:
        return
    ending = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    if ending and ending.lower() not in endings:
        problem = f"the name of the picture must end in {' or '.join(endings)}, got {ending}"
        raise ViewError(problem, file=path, hint=str(path.with_suffix(endings[0])))


def _same_file(first: Path, second: Path) -> bool:
    """Whether two paths are the same regular file, also through links; a device or pipe may be used twice."""
    if first.exists() and second.exists():
        return first.samefile(second) and first.is_file()
    return first.resolve() == second.resolve()


def check_target(path: Path) -> None:
    """Refuse a file that cannot be written, before work is spent on its contents."""
    if path.is_dir():
        raise PenstockError("expected a file, got a directory", file=path, hint=f"{path / 'NAME'}")
    if not path.parent.is_dir():
        raise PenstockError("the directory of the file does not exist", file=path, hint=f"mkdir -p {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PenstockError("no permission to write the file", file=path)
