"""Two stages per rank placed as a V; no bubble between a rank's first and last pass at F = I = W.

Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 6. Choose it when the three passes take about equal time:
the first and the last stage share rank 0, so the loss is near the start, and memory is that of 1f1b on every rank.

For 2 ranks and 4 microbatches:

    rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3 .
    rank 1 | .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3
"""

from dataclasses import dataclass

import numpy as np

from penstock.ir import Codes, Kind, Orders, Placement, Schedule, microbatch_of, number_microbatches, pack
from penstock.schedules.base import Scheduler


@dataclass(frozen=True)
class ZBV(Scheduler):
    """Exactly two stages per rank."""

    stages_per_rank: int = 2
    name = "zbv"
    allowed_stages_per_rank = (2,)
    splits_backward = True

    def build(self, ranks: int, microbatches: int) -> Schedule:
        # The phases need 2 ranks - 1 microbatches; for fewer, the surplus of a longer schedule is removed, as
        # microbatches do not depend on each other.
        planned = max(2 * ranks - 1, microbatches)
        orders = (_order(rank, ranks, planned) for rank in range(ranks))
        kept = [codes[microbatch_of(codes) < microbatches] for codes in orders]
        return Schedule(Placement.vee(ranks), microbatches, Orders(kept))


def _order(rank: int, ranks: int, microbatches: int) -> Codes:
    """The order of one rank; names with 0 are passes of its stage down the V, names with 1 of that back up."""
    f0, i0, w0 = (pack(kind, rank) for kind in (Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD))
    f1, i1, w1 = (pack(kind, 2 * ranks - 1 - rank) for kind in (Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD))
    ahead = 2 * ranks - 1 - rank
    # Passes, and how often they are repeated: filling the pipeline, the steady state, draining it.
    phases = (
        ((f0,), ahead - rank),
        ((f1, f0), rank),
        ((f1, i1, w1), ranks - rank),
        ((f0, i0, w0, f1, i1, w1), microbatches - ahead),
        ((i0, w0, f1, i1, w1), ahead - ranks),
        ((i0, i1), rank),
        ((i0, w0), ranks - rank),
        ((w1,), rank),
        ((w0,), rank),
    )
    return number_microbatches(np.concatenate([np.tile(np.concatenate(phase), times) for phase, times in phases]))
