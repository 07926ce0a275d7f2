"""Watches the status files of the other ranks, so that this rank does not wait for one that has died.

gloo notices a dead peer only through a closed connection or a timeout. The status files are quicker, and they show why
the peer stopped.
"""

import math
import threading
import time
from collections.abc import Sequence
from typing import Any

from penstock.errors import RunError
from penstock.ir import Free, Message
from penstock.launch.agent import end_process
from penstock.launch.process_state import GONE
from penstock.launch.reports import (
    FOLLOWS,
    ErrorReport,
    WaitFailure,
    classify_wait_error,
    explain_hang,
    one_line,
    status_line,
    summary_of,
)
from penstock.launch.status_file import (
    ABSENT,
    BUSY,
    ENDED,
    MAX_FAILURE_BYTES,
    PREPARING,
    STARTED,
    SYNCING,
    WORKING,
    RankStatus,
    StatusFile,
    StatusReader,
    action_of,
    action_text,
)

_POLL_SECONDS = 0.2
_POLLS_PER_PROCESS_CHECK = 5  # asking the system whether a process lives costs far more than reading its status file
_GRACE_SECONDS = 1.0  # a closed connection usually raises in the main thread first, with a better error
_EVIDENCE_SECONDS = 0.5  # a connection closes a little before its rank has recorded why
_IN_FLIGHT_SECONDS = 2.0  # messages that a rank sent before it ended may still be on their way


class PeerWatcher:
    """Watches the peers of one rank; all rank numbers are those of the status files. Passive until `start`."""

    def __init__(
        self, status: StatusFile, deadline_seconds: float, group_ranks: Sequence[int], setting: str = "the deadline"
    ) -> None:
        """`setting` is the option that sets the deadline, for error messages."""
        self._status, self._setting = status, setting
        self.deadline_seconds = deadline_seconds
        """the current limit of a wait, for error messages"""
        self._peers = tuple(rank for rank in group_ranks if rank != status.rank)
        self._readers: dict[int, StatusReader] = {}
        # Set once the main thread has seen a failed wait, and will raise an error itself.
        self._noticed = threading.Event()
        self._stopped = threading.Event()

    def start(self) -> None:
        """From now on, end this process (exit code 5) if a peer fails and the main thread does not notice."""
        threading.Thread(target=self._watch, name="penstock-watch", daemon=True).start()

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()

    def failed_peer(self, check_processes: Sequence[int] | None = None) -> str:
        """Describe a peer that failed or died, empty if there is none.

        Whether a process is alive is checked for all peers, or only for those in `check_processes` that have recorded
        nothing since they were last checked.
        """
        if len(self._readers) < len(self._peers):
            # Only those not open yet: ranks of other hosts never have a file here.
            missing = (rank for rank in self._peers if rank not in self._readers)
            found = {rank: StatusReader.of(self._status.directory, rank) for rank in missing}
            self._readers |= {rank: reader for rank, reader in found.items() if reader is not None}
        for rank, reader in self._readers.items():
            if reader.failure:
                return f"rank {rank} failed: {summary_of(reader.failure)}"
            is_checked = check_processes is None or (rank in check_processes and not reader.has_changed())
            # Between steps a rank may exit normally: its script can end a little before ours.
            if is_checked and reader.process == GONE and reader.status().state in BUSY:
                return status_line(reader.status(), time.monotonic())
        return ""

    def finished_peer(self) -> str:
        """Describe a peer that finished although this rank still waits for it, empty if there is none."""
        if self._status.waiting_seconds < _IN_FLIGHT_SECONDS:
            return ""
        now = self._status.now
        awaited = self._peers if now.state == SYNCING else (now.peer,)
        ended = [rank for rank in awaited if rank is not None and self._read(rank).state == ENDED]
        point = now.sync_point if now.state == SYNCING else f"{now.action} of step {now.step}"
        return f"rank {ended[0]} finished before {point}" if ended else ""

    def idle_seconds(self) -> float:
        """Seconds since any rank of this host was last starting, preparing a step or computing."""
        now, seconds = time.monotonic(), math.inf
        for status in self._read_all():
            # A rank of another host has no file here: it may be at work.
            is_at_work = status.state in (ABSENT, STARTED, PREPARING, WORKING) and not status.failure
            seconds = min(seconds, 0.0 if is_at_work else now - status.now.since)
        return seconds

    def message_error(self, code: int, peer: int, error: BaseException) -> RunError:
        """Explain a RuntimeError of torch.distributed that ended a wait for the message `code`."""
        self._noticed.set()
        rank, text = self._status.rank, action_text(code)
        match classify_wait_error(error):
            case WaitFailure.TIMEOUT:
                return RunError(
                    f"rank {rank} timed out waiting for {text} from rank {peer}",
                    **self._location(code),
                    deadline_seconds=self.deadline_seconds,
                    report=explain_hang(self._read_all(), time.monotonic()),
                    hint=f"look at the rank named first; if it was busy and not stuck, increase {self._setting}",
                )
            case WaitFailure.CLOSED:
                end = time.monotonic() + _EVIDENCE_SECONDS
                status = self._read(peer)
                while not (status.failure or status.process == GONE) and time.monotonic() < end:
                    time.sleep(_EVIDENCE_SECONDS / 20)
                    status = self._read(peer)
                problem = f"rank {rank} lost contact with rank {peer} while waiting for {text}"
                return RunError(problem, **self._location(code), report=status_line(status, time.monotonic()))
        problem = f"rank {rank} could not receive {text} from rank {peer}"
        return RunError(problem, **self._location(code), reason=one_line(error))

    def sync_error(self, error: BaseException) -> RunError:
        """Explain a RuntimeError of torch.distributed that ended a synchronisation of all ranks."""
        self._noticed.set()
        failure = classify_wait_error(error)
        is_timeout = failure is WaitFailure.TIMEOUT
        end = time.monotonic() + (_EVIDENCE_SECONDS if failure is WaitFailure.CLOSED else 0.0)
        while not self.failed_peer() and time.monotonic() < end:
            time.sleep(_EVIDENCE_SECONDS / 20)
        now = self._status.now
        point, report = now.sync_point or "a synchronisation", explain_hang(self._read_all(), time.monotonic())
        rank, step = self._status.rank, now.step
        if is_timeout:
            hint = "the same calls on every rank; look at the rank named first; if it was busy and not stuck, increase "
            return RunError(
                f"rank {rank} timed out waiting for the other ranks at {point}",
                step=step,
                deadline_seconds=self.deadline_seconds,
                report=report,
                hint=hint + self._setting,
            )
        problem = f"rank {rank} lost contact with the other ranks at {point}"
        return RunError(problem, step=step, reason=one_line(error), report=report)

    def _location(self, code: int) -> dict[str, Any]:
        location: dict[str, Any] = {"step": self._status.now.step}
        action = action_of(code)
        if action is not None:
            location["stage"] = action.stage
        if isinstance(action, Message | Free):
            location["microbatch"] = action.microbatch
        return {**location, "action": action_text(code)}

    def _read_all(self) -> list[RankStatus]:
        return [self._read(rank) for rank in sorted((*self._peers, self._status.rank))]

    def _read(self, rank: int) -> RankStatus:
        reader = StatusReader.of(self._status.directory, rank)
        return reader.status() if reader else RankStatus(rank)

    def _watch(self) -> None:
        """The loop of the watching thread."""
        # When a failed peer was first seen, and how often the peers were looked at.
        since, polls = None, 0
        while not self._stopped.is_set():
            # Cheaper than to wait for the event with a timeout, and a thread that ends a little later does no harm.
            time.sleep(_POLL_SECONDS)
            polls += 1
            checked: Sequence[int] | None = None
            if since is None:
                # One peer per check is enough, as every rank is watched by all others.
                check, rest = divmod(polls, _POLLS_PER_PROCESS_CHECK)
                checked = () if rest or not self._peers else (self._peers[check % len(self._peers)],)
            reason = self.failed_peer(checked) or self.finished_peer()
            if not reason or self._noticed.is_set() or self._status.failure:
                since = None
                continue
            since = since or time.monotonic()
            if time.monotonic() - since >= _GRACE_SECONDS:
                rank, summary = self._status.rank, f"rank {self._status.rank} stopped because {reason}"
                self._status.failed(ErrorReport(rank, summary, kind=FOLLOWS).to_json(MAX_FAILURE_BYTES))
                end_process(summary)
