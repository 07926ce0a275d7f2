"""Watch: a rank's look at the boards of the others, so that it neither waits for the dead nor ends without a reason."""

import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from penstock.errors import RunError
from penstock.ir import Free, Message
from penstock.launch.board import LARGEST_FAILURE, Board, Page
from penstock.launch.contact import Loss, loss_of
from penstock.launch.failure import FOLLOWS, Failure, one_line, summary_of
from penstock.launch.hang import explain, line
from penstock.launch.liveness import GONE
from penstock.launch.status import BUSY, ENDED, MEETING, WAITING, Status, action_of

EXIT_CODE = 5
_LOOK_SECONDS = 0.2
_LOOKS_PER_QUESTION = 5  # asking the system whether a process lives costs far more than reading what it has noted
_GRACE_SECONDS = 1.0  # a closed connection usually tells the main thread by itself, and better
_EVIDENCE_SECONDS = 0.5  # a connection closes a little before its rank has noted why
_PATIENCE_SECONDS = 2.0  # what a rank sent before it ended may still be on its way


class Watch:
    """Looks after one rank; all numbers of ranks are those of the board. It acts by itself only once started."""

    def __init__(self, board: Board, deadline_seconds: float, group_ranks: Sequence[int]) -> None:
        self._board = board
        self.deadline_seconds = deadline_seconds
        """how long waits are at present"""
        self._others = tuple(rank for rank in group_ranks if rank != board.rank)
        self._pages: dict[int, Page] = {}
        self._noticed = threading.Event()
        self._stopped = threading.Event()

    def start(self) -> None:
        """From now on, end this process (exit code 5) if another rank breaks and this one does not notice itself."""
        threading.Thread(target=self._look_after, name="penstock-watch", daemon=True).start()

    def stop(self) -> None:
        """Leave this process alone from now on."""
        self._stopped.set()

    def trouble(self, asked: Sequence[int] | None = None) -> str:
        """Why another rank will send nothing more, empty if all is well; the system is asked about all, or these."""
        for rank in self._others:
            page = self._pages.get(rank) or Page.of(self._board.directory, rank)
            if page is None:
                continue
            self._pages[rank] = page
            if page.failure:
                return f"rank {rank} failed: {summary_of(page.failure)}"
            # Between steps a rank may end: its script is done a little earlier than ours.
            is_gone = (asked is None or rank in asked) and page.process == GONE
            if is_gone and page.status().state in BUSY:
                return line(page.status(), time.monotonic())
        return ""

    def desertion(self) -> str:
        """Why a wait of this rank will never end although nothing broke: who is to come has done all its work."""
        now = self._board.now
        if now.state not in (WAITING, MEETING) or time.monotonic() - now.since < _PATIENCE_SECONDS:
            return ""
        awaited = self._others if now.state == MEETING else (now.peer,)
        ended = [rank for rank in awaited if rank is not None and self._status(rank).state == ENDED]
        what = now.occasion if now.state == MEETING else f"{now.action} of step {now.step}"
        return f"rank {ended[0]} had done all its work before {what}" if ended else ""

    def lost(self, code: int, peer: int, error: BaseException) -> RunError:
        """The error, in words, of a wait for the message `code` that ended with a RuntimeError of torch.distributed."""
        self._noticed.set()
        match loss_of(error):
            case Loss.TIMEOUT:
                return self._overdue(code, peer)
            case Loss.CLOSED:
                return self._closed(code, peer)
        problem = f"rank {self._board.rank} lost the message {_text(code)} of rank {peer}"
        return RunError(problem, **self._place(code), reason=one_line(error))

    def parted(self, error: BaseException) -> RunError:
        """The error, in words, of a meeting of all ranks that ended with a RuntimeError of torch.distributed."""
        self._noticed.set()
        is_late = loss_of(error) is Loss.TIMEOUT
        end = time.monotonic() + (_EVIDENCE_SECONDS if loss_of(error) is Loss.CLOSED else 0.0)
        while not self.trouble() and time.monotonic() < end:
            time.sleep(_EVIDENCE_SECONDS / 20)
        now = self._board.now
        return RunError(
            f"rank {self._board.rank} waited in vain for the other ranks at {now.occasion or 'a meeting'}",
            step=now.step,
            **({"deadline_seconds": self.deadline_seconds} if is_late else {"reason": one_line(error)}),
            report=explain(self._statuses(), time.monotonic()),
            hint="the same calls on every rank; look at the rank named first" if is_late else "",
        )

    def _overdue(self, code: int, peer: int) -> RunError:
        return RunError(
            f"rank {self._board.rank} waited in vain for {_text(code)} of rank {peer}",
            **self._place(code),
            deadline_seconds=self.deadline_seconds,
            report=explain(self._statuses(), time.monotonic()),
            hint="look at the rank named first, or set a longer deadline",
        )

    def _closed(self, code: int, peer: int) -> RunError:
        end = time.monotonic() + _EVIDENCE_SECONDS
        status = self._status(peer)
        while not (status.failure or status.process == GONE) and time.monotonic() < end:
            time.sleep(_EVIDENCE_SECONDS / 20)
            status = self._status(peer)
        problem = f"rank {self._board.rank} lost contact with rank {peer} while waiting for {_text(code)}"
        return RunError(problem, **self._place(code), report=line(status, time.monotonic()))

    def _place(self, code: int) -> dict[str, Any]:
        place: dict[str, Any] = {"step": self._board.now.step}
        action = action_of(code)
        if action is not None:
            place["stage"] = action.stage
        if isinstance(action, Message | Free):
            place["microbatch"] = action.microbatch
        return {**place, "action": _text(code)}

    def _statuses(self) -> list[Status]:
        return [self._status(rank) for rank in sorted((*self._others, self._board.rank))]

    def _status(self, rank: int) -> Status:
        page = Page.of(self._board.directory, rank)
        return page.status() if page else Status(rank)

    def _look_after(self) -> None:
        since, looks = None, 0
        while not self._stopped.wait(_LOOK_SECONDS):
            looks += 1
            reason = self.trouble(self._asked(looks) if since is None else None) or self.desertion()
            if not reason or self._noticed.is_set() or self._board.failure:
                since = None
                continue
            since = since or time.monotonic()
            if time.monotonic() - since >= _GRACE_SECONDS:
                self._leave(reason)

    def _asked(self, looks: int) -> Sequence[int]:
        """About whom the system is asked now: one after the other, as every rank is looked after by all others."""
        turn, left = divmod(looks, _LOOKS_PER_QUESTION)
        return () if left or not self._others else (self._others[turn % len(self._others)],)

    def _leave(self, reason: str) -> None:
        summary = f"rank {self._board.rank} stopped, because {reason}"
        self._board.failed(Failure(self._board.rank, summary, kind=FOLLOWS).to_json(LARGEST_FAILURE))
        # The main thread may sit in the middle of a print: what it holds must not keep this thread from leaving.
        flushing = threading.Thread(target=sys.stdout.flush, daemon=True)
        flushing.start()
        flushing.join(_LOOK_SECONDS)
        os.write(2, f"penstock: {summary}\n".encode())
        os._exit(EXIT_CODE)


def _text(code: int) -> str:
    action = action_of(code)
    return f"code {code}" if action is None else str(action)
