"""Converts an exception, or the sudden end of a rank, to a record for the status file and the launcher."""

import json
import re
import time
import traceback
from dataclasses import asdict, dataclass, field, replace
from enum import Enum

from penstock.errors import PenstockError

CAUSE, FOLLOWS, FINAL = "cause", "follows", "final"
_LOCATION = ("step", "stage", "microbatch", "action")
_CUT = "\n  [...]\n"


@dataclass(frozen=True)
class ErrorReport:
    """A failure of one rank and its location."""

    rank: int
    summary: str
    """one line"""
    text: str = ""
    """the whole traceback; empty for a rank that ended without one"""
    location: dict[str, str] = field(default_factory=dict)
    """step, stage, microbatch and action, as far as they are known"""
    kind: str = CAUSE
    """`cause`, `follows`: a consequence of another rank's failure, or `final`: another attempt would fail as well"""
    hint: str = ""
    message: str = ""
    """the whole message of a PenstockError, which is readable without its traceback"""
    at: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, error: BaseException, rank: int, skip: int = 0) -> "ErrorReport":
        """Report an exception that was just caught; `skip` leaves out the outermost frames of the traceback."""
        frames = error.__traceback__
        for _ in range(skip):
            frames = frames.tb_next if frames and frames.tb_next else frames
        text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
        values = error.values if isinstance(error, PenstockError) else {}
        location = {name: str(values[name]) for name in _LOCATION if name in values}
        kind = CAUSE
        if is_consequence(error):
            kind = FOLLOWS
        elif isinstance(error, PenstockError) and error.is_final:
            kind = FINAL
        message = str(error) if isinstance(error, PenstockError) else ""
        return cls(rank, one_line(error), text, location, kind, message=message)

    @property
    def follows(self) -> bool:
        """Whether this is only a consequence of another rank's failure."""
        return self.kind == FOLLOWS

    @classmethod
    def from_text(cls, rank: int, text: str) -> "ErrorReport":
        """Read a report back; a text that is not JSON of a report becomes its summary."""
        return _parse(text) or cls(rank, summary_of(text))

    def to_json(self, limit: int | None = None) -> str:
        """The report as JSON; if `limit` bytes are not enough, the middle of the traceback is left out."""
        text = json.dumps(asdict(self))
        if limit is None or len(text) <= limit:
            return text
        short = replace(self, summary=self.summary[:500], text="", hint="", message=self.message[:2000])
        room = max(0, limit - len(short.to_json()) - 100)
        # One character takes up to twelve bytes in JSON, so both halves shrink until they fit.
        half = room // 2
        while half and len(json.dumps(self.text[:half] + _CUT + self.text[-half:])) > room:
            half = half * 3 // 4
        return replace(short, text=self.text[:half] + _CUT + self.text[-half:] if half else "").to_json()


def one_line(error: BaseException) -> str:
    """Type and first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def summary_of(text: str) -> str:
    """One line for the failure in a status file."""
    report = _parse(text)
    return report.summary if report else (text.strip().splitlines() or ["unknown failure"])[0][:500]


def _parse(text: str) -> ErrorReport | None:
    try:
        return ErrorReport(**json.loads(text))
    except (ValueError, TypeError):
        return None


class WaitFailure(Enum):
    """Why a wait of torch.distributed ended without its message."""

    TIMEOUT = "timeout"
    CLOSED = "closed"
    OTHER = "other"


# torch.distributed raises RuntimeError for everything, so that only the text distinguishes the causes.
# gloo: "Timed out waiting 500ms for recv operation to complete", "Operation timed out!", and for every later message of
# the pair "Application timeout caused pair closure"; NCCL: "Watchdog caught collective operation timeout".
_TIMEOUT = re.compile(r"tim(ed|e)[ -]?out", re.IGNORECASE)
# gloo: "Connection closed by peer [127.0.0.1]:49355. ..." or the system's text for a socket error; NCCL: "remote
# process exited or there was a network error".
_CLOSED = re.compile(
    r"connection (was )?(closed|reset|refused|aborted|lost)|broken pipe|not connected|remote process exited"
    r"|network error|software caused connection abort|socket (is )?closed",
    re.IGNORECASE,
)


def classify_wait_error(error: BaseException) -> WaitFailure:
    """Classify an error of torch.distributed by its text."""
    text = str(error)
    if _CLOSED.search(text):  # first, because the text of a closed connection may mention a timeout
        return WaitFailure.CLOSED
    return WaitFailure.TIMEOUT if _TIMEOUT.search(text) else WaitFailure.OTHER


def is_consequence(error: BaseException) -> bool:
    """Whether the error, or one that caused it, only reports that another rank has ended."""
    link: BaseException | None = error
    while link is not None:
        # After a timeout gloo closes the pair of ranks, and reports "pair closure" for every later message.
        is_closed = classify_wait_error(link) is WaitFailure.CLOSED or "pair closure" in str(link)
        if isinstance(link, RuntimeError) and is_closed:
            return True
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return False
