"""Failure: what broke on one rank and where, as a record that can be written to the board and sent to the launcher."""

import json
import time
import traceback
from dataclasses import asdict, dataclass, field, replace

from penstock.errors import PenstockError
from penstock.launch.contact import follows_another

OWN, FOLLOWS, FINAL = "own", "follows", "final"
PLACES = ("step", "stage", "microbatch", "action")
_CUT = "\n  [...]\n"


@dataclass(frozen=True)
class Failure:
    """An exception, or the sudden end of a rank."""

    rank: int
    summary: str
    """One line."""
    text: str = ""
    """The whole traceback; empty for a rank that ended without one."""
    places: dict[str, str] = field(default_factory=dict)
    """Step, stage, microbatch and action, as far as they are known."""
    kind: str = OWN
    """Whether it is the rank's own, only says that another one went away, or makes another attempt senseless."""
    hint: str = ""
    words: str = ""
    """The whole message, where the error was raised on purpose: its reader needs no traceback."""
    at: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, error: BaseException, rank: int, skip: int = 0) -> "Failure":
        """The failure of this rank by an exception that was just caught; `skip` leaves out the outermost frames."""
        frames = error.__traceback__
        for _ in range(skip):
            frames = frames.tb_next if frames and frames.tb_next else frames
        text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
        values = error.values if isinstance(error, PenstockError) else {}
        places = {name: str(values[name]) for name in PLACES if name in values}
        words = str(error) if isinstance(error, PenstockError) else ""
        return cls(rank, one_line(error), text, places, _kind_of(error), words=words)

    @property
    def follows(self) -> bool:
        """Whether it only says that another rank went away."""
        return self.kind == FOLLOWS

    @classmethod
    def from_json(cls, text: str) -> "Failure | None":
        """The failure that a board or a rank tells; None for a text that is none."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError):
            return None

    @classmethod
    def from_board(cls, rank: int, text: str) -> "Failure":
        """The failure of a rank by what it noted, whatever that is."""
        return cls.from_json(text) or cls(rank, summary_of(text))

    def to_json(self, limit: int | None = None) -> str:
        """The record as text; where its size in bytes is limited, the middle of the traceback is left out."""
        text = json.dumps(asdict(self))
        if limit is None or len(text) <= limit:
            return text
        short = replace(self, summary=self.summary[:500], text="", hint="", words=self.words[:2000])
        room = max(0, limit - len(short.to_json()) - 100)
        # A character takes up to twelve bytes in JSON, so the halves are shortened until they fit.
        half = room // 2
        while half and len(json.dumps(self.text[:half] + _CUT + self.text[-half:])) > room:
            half = half * 3 // 4
        return replace(short, text=self.text[:half] + _CUT + self.text[-half:] if half else "").to_json()


def _kind_of(error: BaseException) -> str:
    if follows_another(error):
        return FOLLOWS
    return FINAL if isinstance(error, PenstockError) and error.is_final else OWN


def one_line(error: BaseException) -> str:
    """Type and first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def summary_of(text: str) -> str:
    """One line for the text of a failure on a board, whoever wrote it."""
    known = Failure.from_json(text)
    return known.summary if known else (text.strip().splitlines() or ["unknown failure"])[0][:500]
