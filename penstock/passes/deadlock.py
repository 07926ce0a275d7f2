"""The error for orders that block: who stands where, waiting for what, and the circle they form."""

from penstock.errors import ScheduleError
from penstock.ir import Action, Program, decode

_AROUND = 4


def deadlock(program: Program, blocked: dict[int, tuple[int, int]]) -> ScheduleError:
    """The error for ranks that stand at an action (index) and wait for another (index)."""
    circle = _circle(program, blocked)
    ranks = circle or sorted(blocked)
    told = [_stand(program, rank, *blocked[rank]) for rank in ranks]
    route = " -> ".join(f"rank {rank}" for rank in (*circle, circle[0])) if circle else "no rank can go on"
    return ScheduleError(f"the orders deadlock: {route}\n" + "\n".join(told))


def action_at(program: Program, index: int) -> Action:
    """The action at an index of the program's table."""
    return decode(program.table.codes[index : index + 1])[0]


def _circle(program: Program, blocked: dict[int, tuple[int, int]]) -> list[int]:
    """The ranks that wait for each other in a ring."""
    seen: list[int] = []
    rank = min(blocked)
    while rank in blocked and rank not in seen:
        seen.append(rank)
        rank = int(program.table.rank_of[blocked[rank][1]])
    return seen[seen.index(rank) :] if rank in seen else []


def _stand(program: Program, rank: int, at: int, waits_for: int) -> str:
    table = program.table
    position = at - int(table.starts[rank])
    order = decode(table.rank(rank)[max(0, position - _AROUND) : position + _AROUND + 1])
    here = min(position, _AROUND)
    shown = " ".join(f"[{action}]" if place == here else str(action) for place, action in enumerate(order))
    needed = action_at(program, waits_for)
    other = int(table.rank_of[waits_for])
    where = f"{needed} of rank {other}" if other != rank else f"{needed}, which it does itself later"
    if waits_for == at:
        where = "its own other half"
    return f"  rank {rank} stands at {order[here]} (position {position}), which needs {where}\n      ... {shown} ..."
