"""Schedules by name: (ranks, microbatches, costs) -> Schedule, one per file, all in the table SCHEDULES.

To add one, write a file with a subclass of `Scheduler` and add it to SCHEDULES: the planner, the command line and the
property tests read that table, and the tests then ask for a section and a picture in docs/schedules.md.

base.py is the contract; gpipe.py and one_f_one_b.py are the simplest members. Shared by members: weight_filling.py
moves weight gradients into gaps, vee_blocks.py builds V schedules from the passes of one microbatch.
"""

from penstock.errors import ScheduleError
from penstock.ir import Placement, Schedule, StageCosts, find_named
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
_TORCH_NAMES = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved1f1b": "interleaved",
    "loopedbfs": "looped_bfs",
    "interleavedzerobubble": "interleaved_zb",
    "zbvzerobubble": "zbv",
    "dualpipev": "dualpipe_v",
}
ALIASES = _TORCH_NAMES | {f"schedule{name}": member for name, member in _TORCH_NAMES.items()}
"""further names, in lower case and without punctuation: those of torch's schedules and of their classes"""

__all__ = ["SCHEDULES", "build", "build_on", "find"]


def build(
    name: str, ranks: int, microbatches: int, stages_per_rank: int | None = None, costs: StageCosts | None = None
) -> Schedule:
    """The named schedule; without stages_per_rank with the default of the schedule."""
    member = find(name)
    scheduler = member() if stages_per_rank is None else member(stages_per_rank=stages_per_rank)
    return scheduler(ranks, microbatches, costs)


def build_on(placement: Placement, name: str, microbatches: int, costs: StageCosts | None = None) -> Schedule | None:
    """The named schedule if it has this placement; None if it places stages otherwise or refuses their number."""
    per_rank, rest = divmod(placement.num_stages, placement.num_ranks)
    if rest:
        return None
    try:
        # With costs, weight gradients are moved into the gaps that these stages leave.
        built = build(name, placement.num_ranks, microbatches, per_rank, costs)
    except ScheduleError:
        return None
    return built if built.placement == placement else None


def find(name: str) -> type[Scheduler]:
    """The schedule class of that name, ignoring case and punctuation."""
    return find_named("schedule", name, SCHEDULES, ScheduleError, ALIASES)
