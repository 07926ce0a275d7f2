"""Orders as text and CSV in the grammar that torch reads and writes, extended by messages that skip stages.

A cell is one action: `2F0` `1I3` `1W3` `0B2` `1UNSHARD` `1RESHARD` `2REDUCE_GRAD` `3SEND_F1` `3RECV_F1` `3SEND_B1`
`3RECV_B1` `(2F2;1B0)OVERLAP_F_B`. Ours beyond that: `1SEND_F0>4` (stage 1 sends to stage 4, not to its neighbour),
`4RECV_F0<1`, and `2FREE0`. CSV has a row per rank, a cell per action, an empty cell for a bubble; plain text has a line
per rank, cells separated by blanks, `-` for a bubble.
"""

import csv
import io
import os
import re
from pathlib import Path

import numpy as np

from penstock.errors import FormatError, ScheduleError
from penstock.ir.action import (
    Action,
    Backward,
    Forward,
    Free,
    InputGrad,
    Kind,
    Overlap,
    Recv,
    Reduce,
    Reshard,
    Send,
    Unshard,
    WeightGrad,
)
from penstock.ir.code import Codes, encode, kind_of, peer_of, stage_of
from penstock.ir.cuts import Cuts
from penstock.ir.files import write_atomic
from penstock.ir.orders import MAX_ACTIONS, Orders
from penstock.ir.placement import Placement

_NUMBER = r"(0|[1-9][0-9]{0,5})"
_COMPUTE_CELL = re.compile(rf"{_NUMBER}(F|I|W|B|FREE){_NUMBER}")
_STAGE_CELL = re.compile(rf"{_NUMBER}(UNSHARD|RESHARD|REDUCE_GRAD)")
_MESSAGE_CELL = re.compile(rf"{_NUMBER}(SEND|RECV)_(F|B){_NUMBER}(?:([<>]){_NUMBER})?")
_OVERLAP_CELL = re.compile(rf"\({_NUMBER}F{_NUMBER};{_NUMBER}B{_NUMBER}\)OVERLAP_F_B")
_COMPUTE_WORDS = {"F": Forward, "I": InputGrad, "W": WeightGrad, "B": Backward, "FREE": Free}
_STAGE_WORDS = {"UNSHARD": Unshard, "RESHARD": Reshard, "REDUCE_GRAD": Reduce}


def parse_action(cell: str) -> Action:
    """The action that a cell says; the whole cell must match."""
    if match := _COMPUTE_CELL.fullmatch(cell):
        return _COMPUTE_WORDS[match[2]](int(match[1]), int(match[3]))
    if match := _MESSAGE_CELL.fullmatch(cell):
        return _message(match)
    if match := _STAGE_CELL.fullmatch(cell):
        return _STAGE_WORDS[match[2]](int(match[1]))
    if match := _OVERLAP_CELL.fullmatch(cell):
        forward_stage, forward_microbatch, backward_stage, backward_microbatch = map(int, match.groups())
        return Overlap(Forward(forward_stage, forward_microbatch), Backward(backward_stage, backward_microbatch))
    hint = "cells such as 2F0, 1I3, 3SEND_F1, 1SEND_F0>4, 2REDUCE_GRAD"
    raise FormatError("not an action", cell=repr(cell), hint=hint)


def _message(match: "re.Match[str]") -> Action:
    stage, microbatch, sends, gradient = int(match[1]), int(match[4]), match[2] == "SEND", match[3] == "B"
    towards_later = sends != gradient
    peer = int(match[6]) if match[6] else stage + (1 if towards_later else -1)
    if (match[5] or (">" if sends else "<")) != (">" if sends else "<"):
        raise FormatError("a send names its peer with >, a receive with <", cell=repr(match[0]))
    if peer < 0 or (peer > stage) != towards_later:
        raise FormatError("values go to later stages, gradients to earlier ones", cell=repr(match[0]), peer=peer)
    return (Send if sends else Recv)(stage, microbatch, peer)


def read(source: str | Path) -> list[list[str]]:
    """Rows of cells of a CSV file, of CSV text, or of plain text.

    A str of one line is a path if a file has that name, or if it has neither comma nor blank and is no cell.
    """
    if not isinstance(source, str | Path):
        raise FormatError("a schedule is read from a str or a pathlib.Path", given=type(source).__name__)
    if isinstance(source, Path) or _is_path(source):
        try:
            source = Path(source).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise FormatError("cannot read the schedule file", path=source, reason=error) from None
    if "," in source or not re.search(r"\S[ \t]+\S", source):
        rows = _read_csv(source)
    else:
        rows = [["" if cell == "-" else cell for cell in line.split()] for line in source.splitlines()]
    while rows and not rows[-1]:
        rows.pop()
    return rows


def _is_path(source: str) -> bool:
    if not source or "\n" in source:
        return False
    return os.path.isfile(source) or not (re.search(r"[,\s]", source) or _is_cell(source))


def _read_csv(source: str) -> list[list[str]]:
    reader = csv.reader(io.StringIO(source))
    try:
        return list(reader)
    except csv.Error as error:
        raise FormatError("not CSV", row=reader.line_num, reason=error) from None


def _is_cell(text: str) -> bool:
    try:
        parse_action(text)
    except (FormatError, ScheduleError):
        return False
    return True


def parse(rows: list[list[str]]) -> Orders:
    """The orders that rows of cells say; a bad cell is refused with its row and column, counted from 1."""
    if not rows:
        raise FormatError("an empty schedule")
    if sum(map(len, rows)) > MAX_ACTIONS:
        raise FormatError("too many cells", cells=sum(map(len, rows)), limit=MAX_ACTIONS)
    return Orders([_parse_row(number, row) for number, row in enumerate(rows, start=1)])


def _parse_row(number: int, row: list[str]) -> Codes:
    actions = []
    for column, raw in enumerate(row, start=1):
        cell = raw.strip()
        if not cell:
            continue
        try:
            actions.append(parse_action(cell))
        except (FormatError, ScheduleError) as error:
            where = {"row": number, "column": column, "cell": repr(raw)} | error.values
            raise FormatError(error.problem, hint=error.hint, **{**where, "cell": repr(raw)}) from None
    return encode(actions)


def infer(orders: Orders) -> tuple[Placement, int]:
    """The placement and the number of microbatches that the orders themselves show."""
    passes = orders.passes
    ranks = orders.rank_of[passes.index]
    if not len(ranks):
        raise FormatError("a schedule without actions", ranks=len(orders))
    home = np.full(int(passes.stage.max()) + 1, -1)
    home[passes.stage] = ranks
    if (astray := home[passes.stage] != ranks).any():
        stage = int(passes.stage[astray][0])
        raise FormatError("a stage on two ranks", stage=stage, ranks=sorted(set(ranks[passes.stage == stage].tolist())))
    if (home < 0).any():
        raise FormatError("a stage without actions", stage=int(np.argmax(home < 0)), stages=len(home))
    if missing := set(range(len(orders))) - set(home.tolist()):
        raise FormatError("a rank without actions", rank=min(missing), ranks=len(orders))
    return Placement(tuple(home.tolist())), int(passes.microbatch.max()) + 1


def infer_cuts(orders: Orders, placement: Placement) -> Cuts:
    """A chain of stages, plus the edges that messages name; an edge whose gradients never travel has none."""
    messages = orders.codes[np.isin(orders.kinds, (Kind.SEND, Kind.RECV))]
    sends = kind_of(messages) == Kind.SEND
    source = np.where(sends, stage_of(messages), peer_of(messages))
    target = np.where(sends, peer_of(messages), stage_of(messages))
    if len(target) and max(int(source.max()), int(target.max())) >= placement.num_stages:
        raise FormatError("a message names a stage that has no actions", stages=placement.num_stages)
    pairs = set(zip(source.tolist(), target.tolist(), strict=True))
    chain = set(Cuts.chain(placement.num_stages).edges)
    edges = chain | {(a, b) for a, b in pairs if a < b} | {(b, a) for a, b in pairs if a > b}
    silent = {edge for edge in edges - chain if edge[::-1] not in pairs}
    return Cuts.of(placement.num_stages, edges, silent)


def lines(orders: Orders) -> str:
    """Plain text: a line per rank, cells separated by blanks."""
    return "\n".join(" ".join(map(str, actions)) or "-" for actions in orders)


def write(orders: Orders, path: str | Path | None = None) -> str:
    """CSV text with a row per rank; also written to the path when one is given."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows([str(action) for action in actions] for actions in orders)
    if path is not None:
        write_atomic(path, buffer.getvalue())
    return buffer.getvalue()
