"""Injects faults (`penstock train --fault kill,rank=1,step=5`) to test that a setup survives them.

It ships with the package because it is an option of `train`: users test failures on their own machines, where the tests
are not installed. It does nothing unless the environment allows it.

`kill,rank=1,step=5,action=17` kills rank 1 at status entry 17 of step 5, both counted from 0; `kill,rank=0,save=3` at
the third file that it opens, renames or removes for a checkpoint; `raise,rank=2,after=1.5` raises in the first action
that begins 1.5 seconds after training began.
"""

import errno
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

from penstock.errors import PenstockError
from penstock.launch.status_file import StatusFile

ALLOW_VARIABLE = "PENSTOCK_ALLOW_FAULTS"
KINDS = ("kill", "abort", "exit", "raise", "stop", "slow", "full-disk")
_SIGNALS = {"kill": signal.SIGKILL, "abort": signal.SIGABRT, "stop": signal.SIGSTOP}
_EXAMPLE = "kill,rank=1,step=5,action=3"
_SLOW_EXAMPLE = "slow,rank=1,step=5,seconds=0.1"
_STATUS_CALLS = ("preparing", "syncing", "working", "waiting", "idle")
_FILE_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class InjectedError(Exception):
    """The exception of a fault of kind `raise`."""


@dataclass(frozen=True)
class Fault:
    """A fault, the rank on which it occurs, and when."""

    kind: str
    rank: int = 0
    step: int | None = None
    """the step, counted from 0; for `full-disk` the step of the checkpoint"""
    action: int = 0
    """which status entry of that step, counted from 0"""
    save: int | None = None
    """which file operation, counted from 1 over all checkpoints"""
    after: float | None = None
    """seconds after the rank began to train"""
    seconds: float = 0.0
    """for `slow`: the sleep before every action from then on"""
    attempt: int | None = 0
    """the attempt of the run in which it occurs, counted from 0; None: every one"""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise PenstockError("unknown fault", got=repr(self.kind), known=", ".join(KINDS), hint=_EXAMPLE)
        if sum(when is not None for when in (self.step, self.save, self.after)) != 1:
            problem = "a fault must have exactly one of step, save and after"
            raise PenstockError(problem, got=self, hint=_EXAMPLE)
        if self.kind == "full-disk" and self.step is None:
            hint = "full-disk,rank=1,step=100"
            raise PenstockError("full-disk must have the step of a checkpoint", got=self, hint=hint)
        numbers = (self.rank, self.step, self.action, self.save, self.after, self.seconds, self.attempt)
        if not all(value is None or 0 <= value < math.inf for value in numbers):
            raise PenstockError("numbers of a fault must be 0 or more", got=self, hint=_EXAMPLE)
        if (self.kind == "slow") != (self.seconds > 0):
            raise PenstockError("seconds must be given for slow, and only for it", got=self, hint=_SLOW_EXAMPLE)

    @classmethod
    def parse(cls, text: str) -> "Fault":
        """Read a fault from its text."""
        kind, *pairs = text.split(",")
        values = dict(pair.partition("=")[::2] for pair in pairs)
        known = {field.name for field in fields(cls)} - {"kind"}
        if len(values) < len(pairs):
            raise PenstockError("a fault must not have the same key twice", got=text, hint=_EXAMPLE)
        if unknown := values.keys() - known:
            raise PenstockError("unknown keys in a fault", got=text, keys=", ".join(sorted(unknown)), hint=_EXAMPLE)
        return cls(kind, **{name: _number(text, name, value) for name, value in values.items()})

    def applies_to(self, rank: int, attempt: int) -> bool:
        """Whether the fault occurs on a rank in an attempt."""
        return self.rank == rank and self.attempt in (None, attempt)


def parse_faults(texts: Iterable[str]) -> tuple[Fault, ...]:
    """Read faults from their texts; refused unless the environment allows faults."""
    faults = tuple(map(Fault.parse, texts))
    if faults and os.environ.get(ALLOW_VARIABLE) != "1":
        hint = f"{ALLOW_VARIABLE}=1 in the environment, if that is intended"
        raise PenstockError("fault injection is not allowed in this environment", faults=len(faults), hint=hint)
    return faults


def _number(text: str, name: str, value: str) -> int | float | None:
    if name == "attempt" and value == "every":
        return None
    try:
        return float(value) if name in ("after", "seconds") else int(value)
    except ValueError:
        problem = "values of a fault must be numbers"
        raise PenstockError(problem, got=text, name=name, value=repr(value), hint=_EXAMPLE) from None


class FaultInjector:
    """Injects the faults of one rank in one attempt, each once."""

    def __init__(self, faults: Iterable[Fault], temporary_prefix: str) -> None:
        """`temporary_prefix` begins the directory names of checkpoints that are being written."""
        self._pending = list(faults)
        self._prefix = temporary_prefix
        self._step, self._num_entries, self._num_files = -1, 0, 0
        self._pause_seconds = 0.0
        self._began = time.monotonic()

    def start(self) -> None:
        """Hook into the status file and, by an audit hook, into file operations of this process."""
        for status in StatusFile.opened():
            for name in _STATUS_CALLS:
                setattr(status, name, self._wrap(getattr(status, name)))
        # An audit hook sees every file operation of the process, also those of threads and libraries.
        sys.addaudithook(self._on_audit_event)

    def _wrap(self, record: Callable[..., None]) -> Callable[..., None]:
        def wrapped(step: int, *rest: int) -> None:
            record(step, *rest)
            self._on_entry(step)

        return wrapped

    def _on_entry(self, step: int) -> None:
        self._num_entries = self._num_entries + 1 if step == self._step else 0
        self._step = step
        for fault in list(self._pending):
            if fault.kind == "full-disk" or fault.save is not None:
                continue
            if fault.after is not None:
                is_due = time.monotonic() - self._began >= fault.after
            else:
                # A step may have fewer entries on this rank than the fault names: then the first entry after it counts.
                is_due = fault.step is not None and (self._step, self._num_entries) >= (fault.step, fault.action)
            if is_due:
                self._inject(fault)
        if self._pause_seconds:
            time.sleep(self._pause_seconds)

    def _on_audit_event(self, event: str, values: tuple[Any, ...]) -> None:
        if event not in _FILE_EVENTS or not self._pending or not isinstance(values[0], str | os.PathLike):
            return
        path = os.fspath(values[0])
        if self._prefix not in path:
            return
        self._num_files += 1
        for fault in list(self._pending):
            is_of_step = fault.step is not None and f"-{fault.step:06d}-" in path
            # Only writing needs room: reading and removing succeed on a full disk.
            if fault.kind == "full-disk" and is_of_step and event == "open" and values[2] & _WRITE_FLAGS:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            if fault.save is not None and self._num_files >= fault.save:
                self._inject(fault)

    def _inject(self, fault: Fault) -> None:
        self._pending.remove(fault)  # first: raising below must not repeat it
        if fault.kind in _SIGNALS:
            os.kill(os.getpid(), _SIGNALS[fault.kind])
        elif fault.kind == "exit":
            os._exit(1)
        elif fault.kind == "raise":
            raise InjectedError(f"injected fault: {fault.kind} on rank {fault.rank}")
        elif fault.kind == "slow":
            self._pause_seconds = fault.seconds
