"""Reports what this rank is doing, so that a hang or a lost rank can be explained on every rank.

A background thread ends the process when another rank fails in a way that this one would not notice. Setting the
environment variable PENSTOCK_WATCH=0 disables that thread, for a process that outlives failed steps.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from penstock.errors import RunError
from penstock.launch import (
    MAX_FAILURE_BYTES,
    ErrorReport,
    PeerWatcher,
    StatusFile,
    exit_with_agent,
    shared_status_directory,
    sync_point_code,
)

WATCH_VARIABLE = "PENSTOCK_WATCH"
FIRST_STEP_SECONDS = 600.0
"""minimum deadline of a first step while ranks record the model, compile the program and select kernels"""
_POLL_SECONDS = 0.2


class RankMonitor:
    """Writes the current action to this rank's status file and holds the deadline of every wait."""

    def __init__(
        self,
        ranks: Sequence[int],
        watched: Sequence[int],
        deadline_seconds: float,
        setting: str = "RunOptions(deadline_seconds=...), or --deadline",
        backend: str | None = None,
    ) -> None:
        """`ranks` are those of the pipeline and `watched` further ones to watch for failures, both as global ranks.

        `setting` is the option that sets the deadline, for error messages; `backend` that of the messages, by default
        that of the default group.
        """
        self._ranks = tuple(ranks)
        exit_with_agent()
        self._status = StatusFile.create(shared_status_directory(), dist.get_rank(), dist.get_world_size())
        self._watcher = PeerWatcher(self._status, deadline_seconds, sorted({*ranks, *watched}), setting)
        self._deadline_seconds = deadline_seconds
        self._warm: set[bool] = set()
        """the kinds of step (True: training, False: evaluation) of which at least one has succeeded"""
        self.step = 0
        self._polls_waits = False
        """whether waits poll the other ranks' status, as in a first step, in which they may still prepare or compute"""
        self.has_lost_contact = False
        """whether a message or synchronisation of the current call failed"""
        # A wait of NCCL belongs to the stream of its thread.
        self._can_wait_in_thread = (backend or dist.get_backend()) == "gloo"
        self._set_deadline(is_first=True)
        if os.environ.get(WATCH_VARIABLE, "1") != "0":
            self._watcher.start()
            weakref.finalize(self, self._watcher.stop)

    def wait(self, work: Any) -> None:
        """Wait for an operation of torch.distributed, at most until the deadline.

        In a first step the deadline counts from the moment at which no rank is preparing the step or computing.
        """
        if not self._polls_waits:
            work.wait(self.deadline)
            return
        # gloo closes its connections when a wait times out, so the wait cannot be repeated with a short timeout.
        errors: list[BaseException] = []
        waiting = threading.Thread(target=_wait, args=(work, self.deadline, errors), daemon=True)
        waiting.start()
        start = time.monotonic()
        while waiting.is_alive():
            waiting.join(_POLL_SECONDS)
            if waiting.is_alive():
                self._check_idle(start)
        if errors:
            raise errors[0]

    def check_deadline(self, start: float) -> None:
        """Raise a RuntimeError if a wait that began at `start`, by `time.monotonic`, is past the deadline."""
        if self._polls_waits:
            self._check_idle(start)
        if time.monotonic() - start > self.deadline.total_seconds():
            raise RuntimeError("timed out")

    def _check_idle(self, start: float) -> None:
        """Raise a RuntimeError if for `deadline_seconds` no rank was preparing its first step or computing."""
        if min(time.monotonic() - start, self._watcher.idle_seconds()) > self._deadline_seconds:
            self._watcher.deadline_seconds = self._deadline_seconds
            raise RuntimeError("timed out: no rank is preparing or computing")

    @property
    def directory(self) -> Path:
        """The directory of the status files, which all ranks of this host share."""
        return self._status.directory

    @property
    def action_reporter(self) -> Callable[[int], None]:
        """A function that reports the action of the current step that this rank is about to run, given its code."""
        return partial(self._status.working, self.step)

    def waiting(self, code: int, peer: int) -> None:
        """Report that this rank waits for a message from or to pipeline rank `peer`."""
        self._status.waiting(self.step, code, self._ranks[peer])

    def syncing(self, request: str, step: int) -> None:
        """Report that this rank waits for all others to join a rank sync."""
        self.step = step
        self._status.syncing(step, sync_point_code(request))

    def idle(self) -> None:
        """Report that this rank runs no operation."""
        self._polls_waits = False
        # The status names the last step that ended, and this one did not.
        self._status.idle(max(self.step - 1, 0))

    def preparing(self) -> None:
        """Report that this rank prepares its stages or a new kind of step; others wait for it in their first step."""
        self._status.preparing(self.step)

    def step_started(self, step: int, is_training: bool) -> None:
        """Report that a step begins. The caller has handled any earlier failure, so its report is cleared."""
        self.step, self.has_lost_contact = step, False
        self._set_deadline(is_first=is_training not in self._warm)
        self._polls_waits = is_training not in self._warm and self._can_wait_in_thread
        self._status.preparing(step)
        if self._status.failure:
            self._status.recovered()

    def step_finished(self, is_training: bool) -> None:
        """Report that a step succeeded. Later steps of its kind are warm: their waits have the short deadline."""
        self._warm.add(is_training)
        self._polls_waits = False
        self._set_deadline(is_first=False)
        self._status.idle(self.step if is_training else max(self.step - 1, 0))

    def step_failed(self, error: BaseException) -> None:
        """Report the error of a step that failed on this rank only to the other ranks."""
        self._polls_waits = False
        self._status.failed(ErrorReport.of(error, self._status.rank).to_json(MAX_FAILURE_BYTES))

    def message_error(self, code: int, peer: int, error: RuntimeError) -> RunError:
        """The error to raise when waiting for a message failed."""
        self.has_lost_contact = True
        return self._watcher.message_error(code, self._ranks[peer], error)

    def sync_error(self, error: RuntimeError) -> RunError:
        """The error to raise when a collective operation of all ranks failed."""
        self.has_lost_contact = True
        return self._watcher.sync_error(error)

    def _set_deadline(self, is_first: bool) -> None:
        seconds = max(self._deadline_seconds, FIRST_STEP_SECONDS if is_first else 0.0)
        self.deadline = timedelta(seconds=seconds)
        self._watcher.deadline_seconds = seconds


def _wait(work: Any, deadline: timedelta, errors: list[BaseException]) -> None:
    try:
        work.wait(deadline)
    except BaseException as error:
        errors.append(error)
