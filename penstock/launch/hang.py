"""Why a pipeline does not move: who waits for what from whom, followed to the rank that everyone waits for."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.ir import Recv, Send
from penstock.launch.failure import summary_of
from penstock.launch.liveness import ELSEWHERE, GONE, STOPPED
from penstock.launch.status import (
    ABSENT,
    BUSY,
    ENDED,
    FAILED,
    IDLE,
    MEETING,
    PREPARING,
    STARTED,
    WAITING,
    WORKING,
    Moment,
    Status,
    action_of,
)

Told = Callable[[Status, float], str]
_UNDER_WAY = (*BUSY, IDLE, STARTED)


def explain(statuses: Sequence[Status], now: float) -> str:
    """One line per rank, the culprit first; `now` is on the clock of the statuses, `time.monotonic`.

    If all processes are gone, and none of them said why, it is told as it was when they ended.
    """
    if len(statuses) > 1 and all(status.process == GONE and status.state in _UNDER_WAY for status in statuses):
        then = [replace(status, process=ELSEWHERE) for status in statuses]
        return f"all processes are gone; by what they noted last:\n{explain(then, now)}"
    by_rank = {status.rank: status for status in statuses}
    waiting = sorted((s for s in statuses if _is_waiting(s)), key=lambda status: status.since)
    verdicts: dict[int, str] = {}
    for status in waiting or _slowest(statuses):
        chain = _chain(status, by_rank)
        culprit = chain[-1]
        if culprit.rank not in verdicts and not _is_told(chain, verdicts):
            verdicts[culprit.rank] = _verdict(chain, by_rank, now)
    rest = [line(status, now) for status in statuses if status.rank not in verdicts]
    return "\n".join([*verdicts.values(), *rest])


def line(status: Status, now: float) -> str:
    """What one rank is doing, in one line."""
    return f"rank {status.rank}: {doing(status, now)}"


def doing(status: Status, now: float) -> str:
    """What one rank is doing, in words."""
    if status.state not in (ABSENT, ENDED, FAILED) and status.process == GONE:
        return f"its process is gone (pid {status.pid}), {_last(status, now)}"
    if status.state not in (ABSENT, ENDED, FAILED) and status.process == STOPPED:
        return f"its process is stopped (pid {status.pid}), {_last(status, now)}"
    return _TOLD[status.state](status, now)


def _is_waiting(status: Status) -> bool:
    # A rank that failed in a wait did so because of the one it waited for.
    return status.now.state in (WAITING, MEETING) and (bool(status.failure) or _is_moving(status))


def _is_moving(status: Status) -> bool:
    return not status.failure and status.process not in (GONE, STOPPED)


def _slowest(statuses: Sequence[Status]) -> list[Status]:
    """Where nobody waits: those that cannot move, else the one that has done nothing else for the longest time."""
    stuck = [s for s in statuses if s.state in (FAILED, *BUSY) and not _is_moving(s)]
    working = sorted((s for s in statuses if s.state in (PREPARING, WORKING)), key=lambda status: status.since)
    return stuck or working[:1]


def _chain(status: Status, by_rank: dict[int, Status]) -> list[Status]:
    """From a rank to the one it waits for, and so on, to one that does not wait or is in the chain already."""
    chain = [status]
    while _is_waiting(chain[-1]):
        following = _awaited(chain[-1], by_rank)
        if following is None:
            break
        chain.append(following)
        if following in chain[:-1]:
            break
    return chain


def _awaited(status: Status, by_rank: dict[int, Status]) -> Status | None:
    """Whom a rank waits for: who is to send the message, or of all ranks the one that is farthest from the meeting."""
    if status.now.state == WAITING:
        return by_rank.get(-1 if status.peer is None else status.peer)
    others = [
        other
        for other in by_rank.values()
        if other.rank != status.rank and not (other.now.state == MEETING and _is_waiting(other))
    ]
    return min(others, key=lambda other: (_is_waiting(other), _is_moving(other), other.since), default=None)


def _is_cycle(chain: Sequence[Status]) -> bool:
    return chain[-1] in chain[:-1]


def _is_told(chain: Sequence[Status], verdicts: dict[int, str]) -> bool:
    return _is_cycle(chain) and any(status.rank in verdicts for status in chain)


def _verdict(chain: Sequence[Status], by_rank: dict[int, Status], now: float) -> str:
    culprit = chain[-1]
    waiter = chain[-2] if len(chain) > 1 else None
    if waiter and _is_moving(culprit) and (sent := _sending(culprit, waiter)):
        told = f"sent {sent.action} of step {sent.step} {_ago(sent.since, now)}, but rank {waiter.rank} has not got it"
        return f"rank {culprit.rank}: {told}: the message was lost; now {doing(culprit, now)}"
    if _is_cycle(chain):
        circle = chain[chain.index(culprit) : -1]
        names = " for ".join(f"rank {status.rank}" for status in (*circle, culprit))
        return f"{names}: they wait for each other, so a message was lost or never sent; {line(culprit, now)}"
    if waiter and waiter.now.state == MEETING and culprit.state in (IDLE, ENDED, STARTED, PREPARING):
        return f"rank {culprit.rank}: did not come to {waiter.now.occasion}, {doing(culprit, now)}"
    if waiter and culprit.state in (IDLE, ENDED, STARTED):
        return f"rank {culprit.rank}: does not send what rank {waiter.rank} waits for, {doing(culprit, now)}"
    if culprit.state == ABSENT:
        return line(culprit, now) + (f", and rank {waiter.rank} waits for it" if waiter else "")
    return f"rank {culprit.rank}: did not move, {doing(culprit, now)}"


def _sending(status: Status, waiter: Status) -> Moment | None:
    """The note that the rank sent what the waiter waits for, None if there is none among its last ones."""
    awaited = action_of(waiter.now.code) if waiter.now.code is not None else None
    if not isinstance(awaited, Recv):
        return None
    wanted = Send(awaited.peer, awaited.microbatch, awaited.stage)
    found = (m for m in reversed(status.recent) if m.step == waiter.step and m.code is not None)
    return next((moment for moment in found if action_of(moment.code or 0) == wanted), None)


def _last(status: Status, now: float) -> str:
    return f"last {_TOLD[status.state](status, now)}"


def _for(since: float, now: float) -> str:
    return f"for {max(0.0, now - since):.1f} s"


def _ago(since: float, now: float) -> str:
    return f"{max(0.0, now - since):.1f} s ago"


def _working(status: Status, now: float) -> str:
    return f"working on {status.action} of step {status.step} {_for(status.since, now)}"


def _waiting(status: Status, now: float) -> str:
    sends = status.now.code is not None and isinstance(action_of(status.now.code), Send)
    what = f"{status.action} of step {status.step} {'to reach' if sends else 'from'} rank {status.peer}"
    return f"waiting for {what} {_for(status.since, now)}"


def _meeting(status: Status, now: float) -> str:
    return f"waiting for all ranks at {status.now.occasion} {_for(status.since, now)}"


def _failed(status: Status, now: float) -> str:
    place = f" in {status.action} of step {status.step}" if status.action else ""
    place = f" at {status.now.occasion}" if status.now.occasion else place
    return f"failed{place}: {summary_of(status.failure)}"


_TOLD: dict[str, Told] = {
    ABSENT: lambda status, now: "nothing is known of it on this host",
    STARTED: lambda status, now: f"started {_ago(status.since, now)}, in no step yet",
    IDLE: lambda status, now: f"between steps {_for(status.since, now)}, after step {status.step}",
    PREPARING: lambda status, now: f"preparing step {status.step} {_for(status.since, now)}",
    MEETING: _meeting,
    WORKING: _working,
    WAITING: _waiting,
    ENDED: lambda status, now: f"had done all its work {_ago(status.since, now)}",
    FAILED: _failed,
}
