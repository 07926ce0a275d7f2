"""Orders as text and CSV in the grammar that torch reads and writes, extended by messages that skip stages.

A cell is one action: `2F0` `1I3` `1W3` `0B2` `1UNSHARD` `1RESHARD` `2REDUCE_GRAD` `3SEND_F1` `3RECV_F1` `3SEND_B1`
`3RECV_B1` `(2F2;1B0)OVERLAP_F_B`. Extensions: `1SEND_F0>4` (stage 1 sends to stage 4, not to its neighbour),
`4RECV_F0<1`, and `2FREE0`. CSV has a row per rank, a cell per action, an empty cell for a bubble; plain text has a line
per rank, cells separated by spaces, `-` for a bubble.
"""

import csv
import io
import os
import re
from contextlib import suppress
from pathlib import Path

from penstock.errors import FormatError, ScheduleError
from penstock.ir.action import (
    PASS_ACTIONS,
    Action,
    Backward,
    ComputeAction,
    Forward,
    Free,
    Overlap,
    Recv,
    Reduce,
    Reshard,
    Send,
    Unshard,
)
from penstock.ir.orders import MAX_ACTIONS, Orders

_NUMBER = r"(0|[1-9][0-9]{0,5})"
_COMPUTE_CELL = re.compile(rf"{_NUMBER}(F|I|W|B|FREE){_NUMBER}")
_STAGE_CELL = re.compile(rf"{_NUMBER}(UNSHARD|RESHARD|REDUCE_GRAD)")
_MESSAGE_CELL = re.compile(rf"{_NUMBER}(SEND|RECV)_(F|B){_NUMBER}(?:([<>]){_NUMBER})?")
_OVERLAP_CELL = re.compile(r"\(([^();]*);([^();]*)\)OVERLAP_F_B")
_PAIR = re.compile(r"\([^()\n]*\)[ \t]*(?=OVERLAP)")
_COMPUTE_WORDS: dict[str, type[ComputeAction | Free]] = {**PASS_ACTIONS, "FREE": Free}
_STAGE_WORDS = {"UNSHARD": Unshard, "RESHARD": Reshard, "REDUCE_GRAD": Reduce}


def parse_action(cell: str) -> Action:
    """The action of a cell; the whole cell must match. An overlapped pair may have blanks in it."""
    cell = _PAIR.sub(_without_blanks, cell)
    if match := _COMPUTE_CELL.fullmatch(cell):
        return _COMPUTE_WORDS[match[2]](int(match[1]), int(match[3]))
    if match := _MESSAGE_CELL.fullmatch(cell):
        return _message(match)
    if match := _STAGE_CELL.fullmatch(cell):
        return _STAGE_WORDS[match[2]](int(match[1]))
    if match := _OVERLAP_CELL.fullmatch(cell):
        # The two are independent, so either may be written first.
        match sorted(map(parse_action, match.groups()), key=lambda part: part.kind):
            case [Forward() as forward, Backward() as backward]:
                return Overlap(forward, backward)
        hint = f"two cells, one after the other: {match[1]},{match[2]}"
        raise FormatError("an overlapped pair must be a forward and a full backward", cell=repr(cell), hint=hint)
    hint = "cells such as 2F0, 1I3, 3SEND_F1, 1SEND_F0>4, 2REDUCE_GRAD"
    raise FormatError("not an action", cell=repr(cell), hint=hint)


def _without_blanks(match: "re.Match[str]") -> str:
    return re.sub(r"[ \t]", "", match[0])


def _message(match: "re.Match[str]") -> Action:
    stage, microbatch, sends, gradient = int(match[1]), int(match[4]), match[2] == "SEND", match[3] == "B"
    towards_later = sends != gradient
    peer = int(match[6]) if match[6] else stage + (1 if towards_later else -1)
    if (match[5] or (">" if sends else "<")) != (">" if sends else "<"):
        raise FormatError("a send must name its peer with >, a receive with <", cell=repr(match[0]))
    if peer < 0 or (peer > stage) != towards_later:
        raise FormatError("values must go to later stages, gradients to earlier ones", cell=repr(match[0]), peer=peer)
    return (Send if sends else Recv)(stage, microbatch, peer)


def read_orders(source: str | Path) -> Orders:
    """The orders of a CSV file, of CSV text, or of plain text.

    A str of one line is taken for a path if a file has that name, or if it is neither a cell nor has commas or spaces.
    """
    if not isinstance(source, str | Path):
        raise FormatError("a schedule must be read from a str or a pathlib.Path", got=type(source).__name__)
    if isinstance(source, Path) or _is_path(source):
        try:
            # Spreadsheets write a byte order mark.
            source = Path(source).read_text(encoding="utf-8-sig")
        except (OSError, ValueError) as error:
            raise FormatError("cannot read the schedule file", file=source, reason=_reason(error)) from None
    # In plain text blanks separate cells.
    source = _PAIR.sub(_without_blanks, source)
    if "," in source or not re.search(r"\S[ \t]+\S", source):
        reader = csv.reader(io.StringIO(source))
        try:
            rows = list(reader)
        except csv.Error as error:
            raise FormatError("not CSV", row=reader.line_num, reason=error) from None
    else:
        rows = [["" if cell == "-" else cell for cell in line.split()] for line in source.splitlines()]
    while rows and not rows[-1]:
        rows.pop()
    return parse_rows(rows)


def _is_path(source: str) -> bool:
    if not source or "\n" in source:
        return False
    if os.path.isfile(source):
        return True
    try:
        parse_action(source)
    except (FormatError, ScheduleError):
        return not re.search(r"[,\s]", source)
    return False


def parse_rows(rows: list[list[str]]) -> Orders:
    """The orders of rows of cells; the error for a bad cell gives its row and column, counted from 1."""
    if not rows:
        raise FormatError("a schedule must have at least one row")
    if sum(map(len, rows)) > MAX_ACTIONS:
        raise FormatError("too many cells", cells=sum(map(len, rows)), limit=MAX_ACTIONS)
    orders: list[list[Action]] = [[] for _ in rows]
    for number, (row, actions) in enumerate(zip(rows, orders, strict=True), start=1):
        for column, raw in enumerate(row, start=1):
            try:
                if cell := raw.strip():
                    actions.append(parse_action(cell))
            except (FormatError, ScheduleError) as error:
                where = {"row": number, "column": column, "cell": repr(raw)} | error.values
                raise FormatError(error.problem, hint=error.hint, **{**where, "cell": repr(raw)}) from None
    return Orders.of(orders)


def format_lines(orders: Orders) -> str:
    """Plain text: a line per rank, cells separated by spaces."""
    return "\n".join(" ".join(map(str, actions)) or "-" for actions in orders)


def write_csv(orders: Orders, path: str | Path | None = None) -> str:
    """CSV text with a row per rank; also written to the path when one is given."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows([str(action) for action in actions] for actions in orders)
    if path is not None:
        write_atomic(path, buffer.getvalue())
    return buffer.getvalue()


def _reason(error: Exception) -> str:
    """What an error says, without its number and without the name of a file, which may be a temporary one."""
    return error.strerror.lower() if isinstance(error, OSError) and error.strerror else str(error)


def write_atomic(path: str | Path, document: str | bytes) -> None:
    """Write a document with `replace_file`; raises FormatError if that fails."""
    try:
        replace_file(Path(path), document.encode() if isinstance(document, str) else document)
    except (OSError, ValueError, TypeError) as error:
        reason, hint = _reason(error), ""
        if isinstance(error, FileNotFoundError):
            directory = Path(path).parent
            reason, hint = f"no such directory: {directory}", f"mkdir -p {directory}"
        raise FormatError("cannot write the file", file=path, reason=reason, hint=hint) from None


def replace_file(path: Path, content: bytes) -> None:
    """Write a temporary file and rename it, so that the path never holds a partial document; raises OSError."""
    if path.exists() and not path.is_file():
        path.write_bytes(content)  # a device or a pipe cannot be replaced by rename
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        with suppress(OSError, ValueError):
            temporary.unlink()
