"""Reports of failures and hangs: the error of one rank, the rank that blocks the others, and the errors of a launch."""

import json
import re
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum

from penstock.errors import PenstockError, RunError
from penstock.ir import Recv, Send
from penstock.launch.process_state import ELSEWHERE, GONE, STOPPED
from penstock.launch.status_file import (
    ABSENT,
    BUSY,
    ENDED,
    FAILED,
    IDLE,
    PREPARING,
    STARTED,
    SYNCING,
    WAITING,
    WORKING,
    RankStatus,
    StatusEntry,
    action_of,
)

CAUSE, FOLLOWS, FINAL = "cause", "follows", "final"
_LOCATION = ("step", "stage", "microbatch", "action")
_CUT = "\n  [...]\n"
_MAX_LINE = 500
"""characters of a summary"""


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
        if is_consequence(error) or (isinstance(error, PenstockError) and error.repeats):
            kind = FOLLOWS
        elif isinstance(error, PenstockError) and error.is_final:
            kind = FINAL
        message = text_of(error) if isinstance(error, PenstockError) else ""
        return cls(rank, one_line(error), text, location, kind, message=message)

    @property
    def follows(self) -> bool:
        """Whether this is only a consequence of another rank's failure."""
        return self.kind == FOLLOWS

    @classmethod
    def from_text(cls, rank: int, text: str) -> "ErrorReport":
        """Read a report back; the summary of a text that is not JSON of one is its first line."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError):
            return cls(rank, (text.strip().splitlines() or ["unknown failure"])[0][:_MAX_LINE])

    def to_json(self, limit: int | None = None) -> str:
        """The report as JSON; if `limit` bytes are not enough, the middle of the traceback is left out."""
        text = json.dumps(asdict(self))
        if limit is None or len(text) <= limit:
            return text
        short = replace(self, summary=self.summary[:_MAX_LINE], text="", hint="", message=self.message[:2000])
        room = max(0, limit - len(short.to_json()) - 100)
        # One character takes up to twelve bytes in JSON, so both halves shrink until they fit.
        half = room // 2
        while half and len(json.dumps(self.text[:half] + _CUT + self.text[-half:])) > room:
            half = half * 3 // 4
        return replace(short, text=self.text[:half] + _CUT + self.text[-half:] if half else "").to_json()


def text_of(error: BaseException) -> str:
    """The message of an error; a replacement if its `__str__` raises."""
    try:
        return str(error)
    except Exception as another:
        return f"<no text: its __str__ raised {type(another).__name__}>"


def one_line(error: BaseException) -> str:
    """Type and first line of an error, of which at most `_MAX_LINE` characters."""
    lines = text_of(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:_MAX_LINE]}" if lines else type(error).__name__


def summary_of(text: str) -> str:
    """One line for the failure in a status file."""
    return ErrorReport.from_text(0, text).summary


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
    text = text_of(error)
    if _CLOSED.search(text):  # first, because the text of a closed connection may mention a timeout
        return WaitFailure.CLOSED
    return WaitFailure.TIMEOUT if _TIMEOUT.search(text) else WaitFailure.OTHER


def is_consequence(error: BaseException) -> bool:
    """Whether the error, or one that caused it, only reports that another rank has ended."""
    link: BaseException | None = error
    while link is not None:
        # After a timeout gloo closes the pair of ranks, and reports "pair closure" for every later message.
        is_closed = classify_wait_error(link) is WaitFailure.CLOSED or "pair closure" in text_of(link)
        if isinstance(link, RuntimeError) and is_closed:
            return True
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return False


# ------------------------------------------------------------------------------------------------------------- hangs

_SIGNAL_HINTS = {
    signal.SIGKILL: "more memory or a smaller batch: the system kills processes when memory runs out (see dmesg)",
    signal.SIGABRT: "the rank's output on stderr: a library aborted the process",
    signal.SIGSEGV: "the rank's output on stderr, which shows its Python stack",
    signal.SIGILL: "ONEDNN_MAX_CPU_ISA=AVX2 in the environment: the processor lacks an instruction",
}


def explain_hang(statuses: Sequence[RankStatus], now: float) -> str:
    """One line per rank, those that block the others first; `now` is in seconds of `time.monotonic`.

    If all processes are gone without having recorded a failure, their last entries are explained instead.
    """
    under_way = (*BUSY, IDLE, STARTED)
    if len(statuses) > 1 and all(status.process == GONE and status.state in under_way for status in statuses):
        last = [replace(status, process=ELSEWHERE) for status in statuses]
        return f"all processes are gone; their last status was:\n{explain_hang(last, now)}"
    by_rank = {status.rank: status for status in statuses}
    # The longest wait first: it most likely leads to the original cause.
    waiting = sorted((status for status in statuses if _is_waiting(status)), key=lambda status: status.now.since)
    blockers: dict[int, str] = {}
    if not waiting:
        # Ranks that cannot progress, or else the rank whose status has not changed for the longest time.
        stuck = [status for status in statuses if status.state in (FAILED, *BUSY) and not _can_progress(status)]
        working = [status for status in statuses if status.state in (PREPARING, WORKING)]
        waiting = stuck or sorted(working, key=lambda status: status.now.since)[:1]
    for status in waiting:
        chain = _wait_chain(status, by_rank)
        blocker = chain[-1]
        is_cycle = blocker in chain[:-1]
        if blocker.rank in blockers or (is_cycle and any(member.rank in blockers for member in chain)):
            continue  # already explained, or a cycle that was entered at another rank
        blockers[blocker.rank] = _explain_blocker(chain, is_cycle, now)
    rest = [status_line(status, now) for status in statuses if status.rank not in blockers]
    return "\n".join([*blockers.values(), *rest])


def status_line(status: RankStatus, now: float) -> str:
    """One line about the current activity of a rank."""
    return f"rank {status.rank}: {_activity(status, now)}"


def _is_waiting(status: RankStatus) -> bool:
    # A rank that failed inside a wait failed because of the rank it waited for.
    return status.now.state in (WAITING, SYNCING) and (bool(status.failure) or _can_progress(status))


def _can_progress(status: RankStatus) -> bool:
    return not status.failure and status.process not in (GONE, STOPPED)


def _wait_chain(status: RankStatus, by_rank: dict[int, RankStatus]) -> list[RankStatus]:
    """Follow the waits from a rank to one that does not wait, or to one that is already in the chain (a cycle)."""
    chain = [status]
    while _is_waiting(chain[-1]):
        following = _awaited(chain[-1], by_rank)
        if following is None:
            break
        chain.append(following)
        if following in chain[:-1]:
            break
    return chain


def _awaited(status: RankStatus, by_rank: dict[int, RankStatus]) -> RankStatus | None:
    """The rank that must send the message; for a synchronisation, the rank that is farthest from reaching it."""
    if status.now.state == WAITING:
        return by_rank.get(-1 if status.now.peer is None else status.now.peer)
    others = [
        other
        for other in by_rank.values()
        if other.rank != status.rank and not (other.now.state == SYNCING and _is_waiting(other))
    ]
    # Ranks that do not wait come first, dead or stopped ones before all, and then the one unchanged for longest.
    return min(others, key=lambda other: (_is_waiting(other), _can_progress(other), other.now.since), default=None)


def _explain_blocker(chain: Sequence[RankStatus], is_cycle: bool, now: float) -> str:
    """One line about the last rank of a chain of waits, which blocks all others in it."""
    blocker = chain[-1]
    waiter = chain[-2] if len(chain) > 1 else None
    activity = _activity(blocker, now)
    if waiter and _can_progress(blocker) and (sent := _matching_send(blocker, waiter)):
        ago = _ago(sent.since, now)
        lost = f"sent {sent.action} of step {sent.step} {ago}, but rank {waiter.rank} has not received it"
        return f"rank {blocker.rank}: {lost}: the message was lost; now {activity}"
    if is_cycle:
        cycle = chain[chain.index(blocker) : -1]
        names = " -> ".join(f"rank {status.rank}" for status in (*cycle, blocker))
        return f"{names}: waiting for each other, so a message was lost or never sent; {status_line(blocker, now)}"
    if waiter and waiter.now.state == SYNCING and blocker.state in (IDLE, ENDED, STARTED, PREPARING):
        return f"rank {blocker.rank}: has not reached {waiter.now.sync_point}, {activity}"
    if waiter and blocker.state in (IDLE, ENDED, STARTED):
        return f"rank {blocker.rank}: has not sent the message that rank {waiter.rank} is waiting for, {activity}"
    if blocker.state == ABSENT:
        return f"rank {blocker.rank}: {activity}" + (f", and rank {waiter.rank} is waiting for it" if waiter else "")
    return f"rank {blocker.rank}: no progress, {activity}"


def _matching_send(status: RankStatus, waiter: RankStatus) -> StatusEntry | None:
    """The entry with which the rank recorded sending the awaited message; None if it is not among the recent ones."""
    awaited = action_of(waiter.now.code) if waiter.now.code is not None else None
    if not isinstance(awaited, Recv):
        return None
    # The stages of a receive are those of its send, exchanged.
    send = Send(awaited.peer, awaited.microbatch, awaited.stage)
    entries = (entry for entry in reversed(status.recent) if entry.step == waiter.now.step and entry.code is not None)
    return next((entry for entry in entries if action_of(entry.code) == send), None)


def _activity(status: RankStatus, now: float) -> str:
    entry = _entry_text(status, now)
    # A rank that finished or failed has recorded that; the state of its process adds nothing.
    if status.state not in (ABSENT, ENDED, FAILED) and status.process in (GONE, STOPPED):
        return f"its process is {status.process} (pid {status.pid}), last {entry}"
    return entry


def _entry_text(status: RankStatus, now: float) -> str:
    """The last entry in words."""
    entry = status.now
    duration = f"for {max(0.0, now - entry.since):.1f} s"
    match status.state:
        case "started":
            return f"started {_ago(entry.since, now)}, not in a step yet"
        case "idle":
            return f"between steps {duration}, after step {entry.step}"
        case "preparing":
            return f"preparing step {entry.step} {duration}"
        case "syncing":
            return f"waiting for all ranks at {entry.sync_point} {duration}"
        case "working":
            return f"working on {entry.action} of step {entry.step} {duration}"
        case "waiting":
            is_send = entry.code is not None and isinstance(action_of(entry.code), Send)
            direction = "to reach" if is_send else "from"
            return f"waiting for {entry.action} of step {entry.step} {direction} rank {entry.peer} {duration}"
        case "ended":
            return f"finished {_ago(entry.since, now)}"
        case "failed":
            location = f" in {entry.action} of step {entry.step}" if entry.action else ""
            location = f" at {entry.sync_point}" if entry.sync_point else location
            return f"failed{location}: {summary_of(status.failure)}"
    return "no status on this host"


def _ago(since: float, now: float) -> str:
    return f"{max(0.0, now - since):.1f} s ago"


# ----------------------------------------------------------------------------------------- errors that launch raises


def launch_error(reports: Sequence[ErrorReport], statuses: Sequence[RankStatus], now: float) -> RunError:
    """The error for a launch in which ranks failed: the cause in full, all other ranks in one line each."""
    # Ranks that only lost contact come after the cause, even if they noticed earlier.
    first, *others = sorted(reports, key=lambda report: (report.follows, report.at))
    also_failed = {report.rank: f"also failed: {report.summary}" for report in others}
    lines = []
    for status in statuses:
        if status.rank == first.rank:
            continue
        # The other ranks were stopped because of this failure: show what each was doing then.
        text = "stopped" if status.state in (ABSENT, STARTED) else f"stopped: {_entry_text(status, now)}"
        if status.state in (ENDED, FAILED):
            text = _entry_text(status, now)
        lines.append(f"rank {status.rank}: {also_failed.get(status.rank, text)}")
    error = RunError(
        "a rank failed" if first.text else first.summary,
        report="\n".join(part for part in (first.text, *lines) if part),
        hint=first.hint,
        **{"rank": first.rank, **_location(first, statuses)},
    )
    error.rank_message, error.rank_summary = first.message, first.summary if first.text else ""
    error.is_final = first.kind == FINAL
    return error


def timeout_error(statuses: Sequence[RankStatus], now: float, seconds: float) -> RunError:
    """The error for a launch that exceeded its timeout."""
    return RunError(
        "the ranks did not finish in time",
        timeout_seconds=seconds,
        report=explain_hang(statuses, now),
        hint="a longer timeout, or look at the rank named first",
    )


def exit_report(rank: int, code: int, at: float) -> ErrorReport:
    """The report for a rank whose process ended without reporting anything itself."""
    if code >= 0:
        return ErrorReport(rank, "a rank exited without a result", location={"exit_code": str(code)}, at=at)
    try:
        number = signal.Signals(-code)
    except ValueError:
        return ErrorReport(rank, "a rank was killed", location={"signal": str(-code)}, at=at)
    hint = _SIGNAL_HINTS.get(number, "")
    return ErrorReport(rank, "a rank was killed", location={"signal": number.name}, hint=hint, at=at)


def _location(report: ErrorReport, statuses: Sequence[RankStatus]) -> dict[str, str]:
    """Where a rank failed: by its own report, or else by its last status."""
    status = next((status for status in statuses if status.rank == report.rank), RankStatus(report.rank))
    has_begun = status.now.state in BUSY or status.now.step > 0
    if "step" in report.location or not has_begun:
        return report.location
    # An idle rank has recorded the step that ended, so it failed before the next one.
    location = {**report.location, "step": str(status.now.step + (status.now.state == IDLE))}
    if not report.text:
        location["action"] = status.now.action or status.now.sync_point or status.now.state
    return location
