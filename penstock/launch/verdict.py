"""What launch says when ranks broke: the first one in full, the others in one line each."""

import signal
from collections.abc import Sequence

from penstock.errors import RunError
from penstock.launch.failure import FINAL, Failure
from penstock.launch.hang import explain
from penstock.launch.status import BUSY, IDLE, Status

_HINTS = {
    signal.SIGKILL: "more memory or a smaller batch: the system kills processes when memory runs out (see dmesg)",
    signal.SIGABRT: "read what the rank wrote to stderr: a library gave up there",
    signal.SIGSEGV: "read what the rank wrote to stderr: its Python stack is shown there",
    signal.SIGILL: "ONEDNN_MAX_CPU_ISA=AVX2 in the environment: the processor lacks an instruction",
}


def broken(failures: Sequence[Failure], statuses: Sequence[Status], now: float) -> RunError:
    """The error of a launch in which ranks failed; those that only lost contact come after the cause."""
    first, *others = sorted(failures, key=lambda failure: (failure.follows, failure.at))
    told = {failure.rank: f"failed too: {failure.summary}" for failure in others}
    lines = [
        f"rank {status.rank}: {told.get(status.rank) or _stopped(status, now)}"
        for status in statuses
        if status.rank != first.rank
    ]
    problem = "a rank failed" if first.text else first.summary
    report = "\n".join(part for part in (first.text, *lines) if part)
    values = {"rank": first.rank, **_places(first, statuses)}
    error = RunError(problem, report=report, hint=first.hint, **values)
    error.rank_message, error.rank_summary = first.words, first.summary if first.text else ""
    error.is_final = first.kind == FINAL
    return error


def _places(failure: Failure, statuses: Sequence[Status]) -> dict[str, str]:
    """Where a rank failed, by its own words or else by what it was last seen doing."""
    status = next((status for status in statuses if status.rank == failure.rank), Status(failure.rank))
    has_begun = status.now.state in BUSY or status.step > 0
    if "step" in failure.places or not has_begun:
        return failure.places
    # Between steps a rank notes the one that has ended.
    seen = {"step": str(status.step + (status.now.state == IDLE))}
    if not failure.text:
        seen["action"] = status.action or status.now.occasion or status.now.state
    return {**failure.places, **seen}


def overdue(statuses: Sequence[Status], now: float, seconds: float) -> RunError:
    """The error of a launch that took longer than it was allowed to."""
    return RunError(
        "the ranks did not end in time",
        timeout_seconds=seconds,
        report=explain(statuses, now),
        hint="a longer timeout, or look at the rank named first",
    )


def sudden(rank: int, code: int, at: float) -> Failure:
    """The failure of a rank whose process ended without a word."""
    if code >= 0:
        return Failure(rank, "a rank ended without a result", places={"exit_code": str(code)}, at=at)
    try:
        number = signal.Signals(-code)
    except ValueError:
        return Failure(rank, "a rank was killed", places={"signal": str(-code)}, at=at)
    return Failure(rank, "a rank was killed", places={"signal": number.name}, hint=_HINTS.get(number, ""), at=at)


def _stopped(status: Status, now: float) -> str:
    seconds = f"{max(0.0, now - status.since):.1f} s"
    match status.state:
        case "working":
            return f"stopped in {status.action}, working {seconds}"
        case "waiting":
            way = "to" if "SEND" in status.action else "from"
            return f"stopped in {status.action} {way} rank {status.peer}, waiting {seconds}"
        case "meeting":
            return f"stopped at {status.now.occasion}, waiting for all ranks {seconds}"
        case "preparing":
            return f"stopped preparing step {status.step}, {seconds}"
        case "ended":
            return "had done all its work"
        case "idle":
            return f"stopped between steps, after step {status.step}"
    return "stopped"
