"""merge_backward: an input gradient directly followed by its weight gradient becomes one full backward.

Choose it where nobody waits for the input gradient, or where one full backward is cheaper than its two halves: the
gradient leaves the stage only after both.
"""

from dataclasses import dataclass

import numpy as np

from penstock.ir import Kind, Orders, Schedule
from penstock.passes.base import ScheduleToSchedule


@dataclass(frozen=True)
class MergeBackward(ScheduleToSchedule):
    """Adjacent I, W of one stage and microbatch -> B."""

    name = "merge_backward"

    def __call__(self, schedule: Schedule) -> Schedule:
        table = schedule.table
        merged = table.codes.copy()
        followed = np.zeros(len(merged), dtype=np.bool_)
        # A code differs from another only in its kind, its lowest bits, when stage and microbatch agree.
        followed[:-1] = (table.kinds[:-1] == Kind.INPUT_GRAD) & (
            merged[1:] - merged[:-1] == Kind.WEIGHT_GRAD - Kind.INPUT_GRAD
        )
        merged[followed] += Kind.BACKWARD - Kind.INPUT_GRAD
        keep = ~np.concatenate(([False], followed[:-1]))
        orders = Orders(np.split(merged, table.starts[1:-1])).select(keep)
        return Schedule(schedule.placement, schedule.num_microbatches, orders)
