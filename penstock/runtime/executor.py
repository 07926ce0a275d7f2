"""Executes compiled programs, that of one rank or those of all ranks in one process, and reports their errors."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

import torch

from penstock.errors import PenstockError, RunError
from penstock.ir import ComputeAction, Message, decode_one
from penstock.runtime.compile import CompiledAction, RankProgram
from penstock.runtime.monitor import RankMonitor

_OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)
_OUT_OF_MEMORY_TEXTS = ("not enough memory", "can't allocate memory")
_MEMORY_HINT = "more microbatches, recompute='full', more ranks, or a schedule that holds less (1f1b, v_half, v_min)"


@dataclass
class ActionTimes:
    """When each action of a rank ran, in seconds of the host's clock, in the order of its program."""

    began: float = field(default_factory=perf_counter)
    """when the step began, after all ranks had synchronised"""
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)


def execute(program: RankProgram, report: Callable[[int], None], times: ActionTimes | None = None) -> None:
    """Run the actions of one rank in order; `report` is given the code of each action that takes time."""
    if times is not None:
        for action in program.actions:
            _run_timed(program, action, times, report)
        return
    code = 0
    try:
        for code, waits, is_reported, run in program.busy:
            for wait in waits:
                wait()
            if is_reported:
                report(code)
            run()
    except Exception as error:
        program.clear()
        raise located_error(error, program.rank, code) from error


def execute_local(programs: Sequence[RankProgram], times: Sequence[ActionTimes] | None = None) -> None:
    """Run all ranks in this process, in turn: each of them until it needs a message that was not sent yet."""
    times = times or [ActionTimes() for _ in programs]
    positions = [0] * len(programs)
    is_done, has_progress = False, True
    while not is_done:
        if not has_progress:
            waiting = [p.actions[at].code for at, p in zip(positions, programs, strict=True) if at < len(p.actions)]
            actions = [str(decode_one(code)) for code in waiting]
            raise RunError("deadlock: every rank waits for another", actions=actions)
        is_done, has_progress = True, False
        for index, program in enumerate(programs):
            while positions[index] < len(program.actions):
                action = program.actions[positions[index]]
                if action.recv_slots and not all(slot.is_ready for slot in action.recv_slots):
                    is_done = False
                    break
                _run_timed(program, action, times[index])
                positions[index] += 1
                has_progress = True


def _run_timed(
    program: RankProgram, action: CompiledAction, times: ActionTimes, report: Callable[[int], None] | None = None
) -> None:
    try:
        for wait in action.waits:
            wait()
        times.starts.append(perf_counter())
        if report is not None:
            report(action.code)
        if action.run is not None:
            action.run()
        times.ends.append(perf_counter())
    except Exception as error:
        program.clear()
        raise located_error(error, program.rank, action.code) from error


@contextmanager
def watch_step(monitor: RankMonitor | None, step: int, is_training: bool) -> Iterator[None]:
    """Report a step to the monitor, and add the step's number to errors.

    An error that only this rank raises is published, so that the others do not wait for it. `monitor` is None if all
    ranks are in this process.
    """
    if monitor is not None:
        monitor.step_started(step, is_training)
    try:
        yield
    except Exception as error:
        located = error.at(step=step) if isinstance(error, RunError) else error
        if monitor is not None:
            # An error that every rank raises needs no publishing.
            if isinstance(located, PenstockError) and located.is_shared:
                monitor.idle()
            else:
                monitor.step_failed(located)
        raise located from error.__cause__
    if monitor is not None:
        monitor.step_finished(is_training)


def located_error(error: Exception, rank: int, code: int) -> Exception:
    """The error as a RunError with rank, stage, microbatch and action; a RunError keeps its text."""
    action = decode_one(code)
    microbatch = action.microbatch if isinstance(action, ComputeAction | Message) else None
    place = {"rank": rank, "stage": action.stage, "microbatch": microbatch, "action": str(action)}
    known = {name: value for name, value in place.items() if value is not None}
    if isinstance(error, RunError):
        return error.at(**known)
    is_memory = isinstance(error, _OUT_OF_MEMORY) or any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS)
    return RunError(f"{type(error).__name__}: {error}", hint=_MEMORY_HINT if is_memory else "", **known)
