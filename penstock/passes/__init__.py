"""Lowering of a Schedule to a Program, one pass per file, and `verify`, which proves a Program legal.

base.py is the contract of a pass. The passes, in the order in which they run: add_transfers.py, hoist_receives.py,
add_reductions.py, add_shard_moves.py, add_frees.py. verification.py has `verify`, with the proof in its docstring.
"""

from collections.abc import Sequence

from penstock.errors import ScheduleError
from penstock.ir import Cuts, Kind, Program, Schedule
from penstock.passes.add_frees import AddFrees
from penstock.passes.add_reductions import AddReductions
from penstock.passes.add_shard_moves import AddShardMoves
from penstock.passes.add_transfers import AddTransfers
from penstock.passes.base import Pass
from penstock.passes.hoist_receives import HoistReceives
from penstock.passes.verification import check_complete, verify

PASSES: dict[str, type[Pass]] = {
    "add_transfers": AddTransfers,
    "hoist_receives": HoistReceives,
    "add_reductions": AddReductions,
    "add_shard_moves": AddShardMoves,
    "add_frees": AddFrees,
}
"""all passes by name, in the order in which they run"""
_ADDED: dict[type[Pass], set[int]] = {
    AddReductions: {Kind.REDUCE},
    AddShardMoves: {Kind.UNSHARD, Kind.RESHARD},
    AddFrees: {Kind.FREE},
}
"""the kinds of action that a pass adds to a program which has none of them"""
DEFAULT_PASSES = ("add_transfers", "hoist_receives", "add_reductions", "add_frees")

__all__ = [
    "DEFAULT_PASSES",
    "PASSES",
    "AddShardMoves",
    "HoistReceives",
    "Pass",
    "check_complete",
    "lower",
    "verify",
]


def lower(
    schedule: Schedule | Program, *, cuts: Cuts | None = None, passes: Sequence[str | Pass] = DEFAULT_PASSES
) -> Program:
    """Add sends, receives, reductions and frees: run passes in the order of the table.

    Args:
        schedule: a Schedule; a Program keeps its order: messages that the cuts do not need are left out, and only
            reductions, shard moves and frees are added if it has none of them
        cuts: which stage reads which; None: every stage reads the previous one
        passes: the passes to run, by name or as records with options

    Returns:
        The program.

    Raises:
        ScheduleError: if the order cannot be lowered
    """
    if not isinstance(schedule, Schedule | Program):
        raise ScheduleError("lower must be given a Schedule or a Program", got=type(schedule).__name__)
    names = list(PASSES)
    steps: list[Pass] = []
    for entry in passes:
        name = entry.name if isinstance(entry, Pass) else entry
        if name not in names:
            raise ScheduleError("unknown pass", name=repr(name), hint=f"one of {', '.join(PASSES)}")
        steps.append(entry if isinstance(entry, Pass) else PASSES[entry]())
    steps.sort(key=lambda step: names.index(step.name))
    if not steps or not isinstance(steps[0], AddTransfers):
        raise ScheduleError("lower must run add_transfers", passes=[step.name for step in steps])
    if isinstance(schedule, Schedule):
        program = schedule.with_cuts(cuts)
    else:
        program = schedule if cuts is None else schedule.with_cuts(cuts)
        known = set(program.table.kinds.tolist())
        # A pass that is not in _ADDED would change the given order of messages: it is not run.
        steps = [step for step in steps if type(step) in _ADDED and known.isdisjoint(_ADDED[type(step)])]
    for step in steps:
        program = step(program)
    return program
