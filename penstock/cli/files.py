"""Files: a noun read from whatever file says it; a document written whole or not at all."""

import gzip
import os
from collections.abc import Iterable
from difflib import get_close_matches
from itertools import combinations
from pathlib import Path
from typing import Any

from penstock.errors import FormatError, PenstockError

ORDERS = (".csv", ".txt", "")
"""what the names of files with orders end in"""


def read_noun(path: Path) -> Any:
    """The noun of a JSON document, or the Schedule or Program of a CSV or plain text."""
    from penstock.ir import MAX_JSON_BYTES, load_record

    try:
        if (size := path.stat().st_size) > MAX_JSON_BYTES:
            raise FormatError("the file is too large", file=path, bytes=size, limit=MAX_JSON_BYTES)
        with path.open("rb") as file:
            is_json = file.read(64).lstrip()[:1] == b"{"
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise FormatError("cannot read the file", file=path, reason=reason, hint=_instead(path)) from None
    if not is_json and path.suffix.lower() not in ORDERS:
        hint = "JSON that penstock wrote, or orders in a file that ends in .csv"
        raise FormatError("neither JSON nor orders", file=path, hint=hint)
    try:
        return load_record(path) if is_json else _read_orders(path)
    except FormatError as error:
        if error.hint:
            raise
        hint = "a file that penstock wrote, whole and unchanged" if is_json else ""
        raise FormatError(error.problem, report=error.report, hint=hint, **error.values) from None


def _instead(path: Path) -> str:
    """What may have been meant by a path that cannot be read."""
    if ":" in path.name and not path.exists():
        return f"a plan's file here; models are for penstock plan {path}, and for check PLAN --model {path}"
    if path.is_dir():
        return f"a file in it, such as {path / 'plan.json'}"
    names = sorted(each.name for each in path.parent.iterdir() if each.is_file()) if path.parent.is_dir() else []
    close = get_close_matches(path.name, names, n=1)
    return f"did you mean {path.parent / close[0]}?" if close else ""


def _read_orders(path: Path) -> Any:
    from penstock.ir import COMPUTE_KINDS, Program, Schedule

    try:
        program = Program.from_csv(path)
    except PenstockError as error:
        raise FormatError(error.problem, hint=error.hint, **{"file": path, **error.values}) from None
    if set(program.table.kinds.tolist()) <= set(COMPUTE_KINDS):
        return Schedule(program.placement, program.num_microbatches, program.table)
    return program


def write(path: Path, document: str | bytes) -> None:
    """Write a document, compressed if the name ends in `.gz`; a file of that name stays whole until the new one is."""
    content = document.encode() if isinstance(document, str) else document
    if path.suffix == ".gz":
        # No time of writing inside: equal traces make equal files.
        content = gzip.compress(content, mtime=0)
    check_target(path)
    if path.exists() and not path.is_file():
        path.write_bytes(content)  # a device or a pipe, which nothing can take the place of
        return
    target = path.resolve()
    draft = target.with_name(f".{target.name}.{os.getpid()}.draft")
    try:
        draft.write_bytes(content)
        draft.replace(target)
    except OSError as error:
        # The draft is no name that the user knows.
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None
    finally:
        draft.unlink(missing_ok=True)


def check_targets(wanted: Iterable[Path | None], source: Path | None = None) -> None:
    """Refuse files that cannot be written, two that are one, and one that is read from."""
    targets = [path for path in wanted if path is not None]
    for path in targets:
        check_target(path)
    if source is not None and any(_are_one(path, source) for path in targets):
        raise PenstockError("the file would be written over what it is made from", file=source, hint="another name")
    if twice := next((one for one, other in combinations(targets, 2) if _are_one(one, other)), None):
        raise PenstockError("two outputs have the same file", file=twice, hint="a name for each")


def _are_one(one: Path, other: Path) -> bool:
    """Whether two paths lead to one file, links included; a device or a pipe can be used more than once."""
    if one.exists() and other.exists():
        return one.samefile(other) and one.is_file()
    return one.resolve() == other.resolve()


def check_target(path: Path) -> None:
    """Refuse a file that cannot be written, before work is spent on what it would hold."""
    if path.is_dir():
        raise PenstockError("a directory stands where the file should go", file=path, hint=f"{path / 'NAME'}")
    if not path.parent.is_dir():
        raise PenstockError("the directory of the file does not exist", file=path, hint=f"mkdir -p {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PenstockError("no permission to write the file", file=path)
