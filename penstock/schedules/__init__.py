"""FAMILY: (ranks, microbatches, costs) -> Schedule, one idea per file."""

import difflib
import re

from penstock.errors import ScheduleError
from penstock.ir.costs import StageCosts
from penstock.ir.schedule import Schedule
from penstock.schedules.base import Scheduler
from penstock.schedules.dualpipe_v import DualPipeV
from penstock.schedules.gpipe import GPipe
from penstock.schedules.interleaved import Interleaved
from penstock.schedules.interleaved_zb import InterleavedZB
from penstock.schedules.looped_bfs import LoopedBFS
from penstock.schedules.one_f_one_b import OneFOneB
from penstock.schedules.v_half import VHalf
from penstock.schedules.v_min import VMin
from penstock.schedules.zb_h1 import ZBH1
from penstock.schedules.zb_h2 import ZBH2
from penstock.schedules.zbv import ZBV

SCHEDULES: dict[str, type[Scheduler]] = {
    "gpipe": GPipe,
    "1f1b": OneFOneB,
    "interleaved": Interleaved,
    "looped_bfs": LoopedBFS,
    "zb_h1": ZBH1,
    "zb_h2": ZBH2,
    "interleaved_zb": InterleavedZB,
    "zbv": ZBV,
    "v_half": VHalf,
    "v_min": VMin,
    "dualpipe_v": DualPipeV,
}
OTHER_NAMES = {"interleaved1f1b": "interleaved", "interleavedzerobubble": "interleaved_zb", "zbvzerobubble": "zbv"}

__all__ = ["SCHEDULES", "build", "find"]


def build(
    name: str, ranks: int, microbatches: int, stages_per_rank: int | None = None, costs: StageCosts | None = None
) -> Schedule:
    """The named schedule; without stages_per_rank the number that the schedule wants."""
    member = find(name)
    scheduler = member() if stages_per_rank is None else member(stages_per_rank=stages_per_rank)
    return scheduler(ranks, microbatches, costs)


def find(name: str) -> type[Scheduler]:
    """The member of that name; case and punctuation do not matter."""
    known = {_plain(key): key for key in SCHEDULES} | OTHER_NAMES
    if _plain(name) in known:
        return SCHEDULES[known[_plain(name)]]
    close = difflib.get_close_matches(_plain(name), known, n=1)
    hint = f"did you mean {known[close[0]]}? " if close else ""
    raise ScheduleError("unknown schedule", name=repr(name), hint=f"{hint}one of {', '.join(SCHEDULES)}")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", str(name).lower())
