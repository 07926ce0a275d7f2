"""Schedules on a V made by repeating the passes of one microbatch every six units of time.

Qi et al. 2024, "Pipeline Parallelism with Controllable Memory". A block gives the times at which each rank runs the
two forwards and the two input gradients of one microbatch. Repeated every six units, it fills each rank exactly if the
four times have different remainders modulo six; the two weight gradients take the other two remainders, as early as
possible. How long a block keeps a microbatch alive decides the memory.
"""

from dataclasses import dataclass
from itertools import permutations

import numpy as np

from penstock.ir import Codes, Kind, Orders, Placement, Schedule
from penstock.schedules.base import passes

_PERIOD = 6


@dataclass(frozen=True)
class Block:
    """Units between neighbouring ranks on the way down and up, forward and backward, and pauses at the three turns."""

    forward_down: int
    forward_up: int
    backward_down: int
    backward_up: int
    pauses: tuple[int, int, int]

    def times(self, rank: int, ranks: int) -> tuple[int, int, int, int]:
        """When a rank runs: forward of its first stage, of its second, input gradient of the second, of the first."""
        last = ranks - 1
        bottom = self.forward_down * last + 1 + self.pauses[0]
        loss = bottom + self.forward_up * last + 1 + self.pauses[1]
        turn = loss + self.backward_down * last + 1 + self.pauses[2]
        return (
            self.forward_down * rank,
            bottom + self.forward_up * (last - rank),
            loss + self.backward_down * rank,
            turn + self.backward_up * (last - rank),
        )


def repeat_block(block: Block, ranks: int, microbatches: int) -> Schedule:
    """The schedule that runs one block per microbatch, six units after the one before."""
    orders = [_order(block.times(rank, ranks), rank, ranks, microbatches) for rank in range(ranks)]
    return Schedule(Placement.vee(ranks), microbatches, Orders(orders))


def _order(times: tuple[int, int, int, int], rank: int, ranks: int, microbatches: int) -> Codes:
    """The order of one rank whose passes of the first microbatch start at these times (`Block.times`)."""
    first, second = rank, 2 * ranks - 1 - rank
    weight_second, weight_first = _weight_times(times)
    items = (
        (Kind.FORWARD, first, times[0]),
        (Kind.FORWARD, second, times[1]),
        (Kind.INPUT_GRAD, second, times[2]),
        (Kind.INPUT_GRAD, first, times[3]),
        (Kind.WEIGHT_GRAD, second, weight_second),
        (Kind.WEIGHT_GRAD, first, weight_first),
    )
    codes = np.concatenate([passes(kind, stage, microbatches) for kind, stage, _ in items])
    moments = np.concatenate([start + _PERIOD * np.arange(microbatches) for _, _, start in items])
    return codes[np.argsort(moments)]


def _weight_times(times: tuple[int, int, int, int]) -> tuple[int, int]:
    """The earliest moments for the weight gradients of the second and the first stage on the two free remainders."""
    free = sorted(set(range(_PERIOD)) - {time % _PERIOD for time in times})
    after = (times[2] + 1, times[3] + 1)
    choices = [
        tuple(start + (slot - start) % _PERIOD for start, slot in zip(after, slots, strict=True))
        for slots in permutations(free)
    ]
    second, first = min(choices, key=sum)
    return second, first
