"""A V schedule whose steady state runs a forward and a backward together.

DeepSeek-AI 2024, "DeepSeek-V3 Technical Report" (DualPipe), folded to a V so that no parameter is held twice. Choose it
when a forward's communication can hide behind a backward's compute, as in models with expert parallelism.

For 2 ranks and 4 microbatches:

    rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 0F3 0F3 .   3F2 3F2 3F2 3B2 3B2 .   3F3 3F3 3F3 3B3 3B3 0I2 0W2 0I3 0W3
           |                             3B1 3B1 3B1     0B0 0B0 0B0             0B1 0B1 0B1
    rank 1 | .   1F0 2F0 1F1 2F1 1F2 2B0 2B0 2F2 2F2 2F2 1F3 1F3 1F3 2F3 2F3 2F3 2B2 2B2 1B2 1B2 .   2I3 1I3 2W3 1W3
           |                                 1B0 1B0 1B0 2B1 2B1 2B1 1B1 1B1 1B1
"""

from dataclasses import dataclass

import numpy as np

from penstock.ir import Codes, Kind, Orders, Placement, Schedule, first_microbatches, kind_of, number_microbatches, pack
from penstock.schedules.base import Scheduler, weight_grads_of


@dataclass(frozen=True)
class DualPipeV(Scheduler):
    """Exactly two stages per rank."""

    stages_per_rank: int = 2
    name = "dualpipe_v"
    allowed_stages_per_rank = (2,)

    def build(self, ranks: int, microbatches: int) -> Schedule:
        # The phases need 2 ranks microbatches; for fewer, the surplus of a longer schedule is removed.
        planned = max(2 * ranks, microbatches)
        orders = [first_microbatches(_order(rank, ranks, planned), microbatches) for rank in range(ranks)]
        return Schedule(Placement.vee(ranks), microbatches, Orders(orders))


def _order(rank: int, ranks: int, microbatches: int) -> Codes:
    """The order of one rank; names with 0 are passes of its first stage, names with 1 those of its second."""
    first, second = rank, 2 * ranks - 1 - rank
    f0, b0, i0 = (pack(kind, first) for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD))
    f1, b1, i1 = (pack(kind, second) for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD))
    w = pack(Kind.WEIGHT_GRAD, 0)  # of the oldest input gradient without one, whatever its stage
    # Overlapped pairs: a forward down the V with a backward of the second stage, and the reverse.
    down, up = pack(Kind.OVERLAP, first, 0, second), pack(Kind.OVERLAP, second, 0, first)
    below = ranks - 1 - rank
    steady = microbatches - 2 * ranks + rank + 1
    # The last rank does not overlap its first pair: its backward starts earlier without.
    opening = (f0, b1, up) if below == 0 else (down, up)
    # Passes, and how often they are repeated: filling the pipeline, the steady state, draining it.
    phases = (
        ((f0,), 2 * below),
        ((f0, f1), rank + 1),
        ((i1, w, f1), below),
        (opening, 1),
        ((down, up), steady - 1),
        ((b1, up), below),
        ((b1, b0), (rank + 1) // 2),
        ((b1, i0) if rank % 2 == 0 else (i1, i0), 1),
        ((i1, i0), rank - (rank + 1) // 2),
        ((w, i0), below),
        ((w,), rank + 1),
    )
    codes = np.concatenate([np.tile(np.concatenate(phase), times) for phase, times in phases])
    kinds = kind_of(codes)
    codes[kinds == Kind.WEIGHT_GRAD] = weight_grads_of(codes[kinds == Kind.INPUT_GRAD])
    return number_microbatches(codes)
