"""The error for orders that deadlock: where each rank is blocked, the action it waits for, and the cycle of ranks."""

from penstock.errors import ScheduleError
from penstock.ir import Program, decode

_CONTEXT = 4
"""actions shown before and after the blocked one"""


def deadlock_error(program: Program, blocked: dict[int, tuple[int, int]]) -> ScheduleError:
    """The error for blocked ranks, given by rank as (index of its next action, index that this waits for)."""
    cycle = _find_cycle(program, blocked)
    lines = [_blocked_rank(program, rank, *blocked[rank]) for rank in cycle or sorted(blocked)]
    route = " -> ".join(f"rank {rank}" for rank in (*cycle, cycle[0])) if cycle else "no rank can continue"
    return ScheduleError(f"the orders deadlock: {route}\n" + "\n".join(lines))


def _find_cycle(program: Program, blocked: dict[int, tuple[int, int]]) -> list[int]:
    """Ranks that wait for each other in a cycle; empty if there is none."""
    seen: list[int] = []
    rank = min(blocked)
    while rank in blocked and rank not in seen:
        seen.append(rank)
        rank = int(program.table.rank_of[blocked[rank][1]])
    return seen[seen.index(rank) :] if rank in seen else []


def _blocked_rank(program: Program, rank: int, at: int, waits_for: int) -> str:
    table = program.table
    position = table.position(at)
    order = decode(table.rank(rank)[max(0, position - _CONTEXT) : position + _CONTEXT + 1])
    here = min(position, _CONTEXT)
    shown = " ".join(f"[{action}]" if place == here else str(action) for place, action in enumerate(order))
    needed, other = table.action(waits_for), int(table.rank_of[waits_for])
    where = f"{needed} of rank {other}" if other != rank else f"{needed}, which comes later in its own order"
    if waits_for == at:
        where = "its own other half"
    return (
        f"  rank {rank} is blocked at {order[here]} (position {position}), which needs {where}\n      ... {shown} ..."
    )
