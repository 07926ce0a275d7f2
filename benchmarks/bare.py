"""A minimal loop over isend and irecv: one stage per rank, without checks, weights or names.

What it costs is what any runtime over these calls costs. It knows stages in a chain, one per rank, with full backwards.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.ir import Forward, Schedule

Posted = tuple[dist.Work, Tensor]


class BareLoop:
    """The order of this rank, receives posted one pass ahead."""

    def __init__(self, schedule: Schedule, part: nn.Module, loss_fn: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.rank, self.last = dist.get_rank(), schedule.num_ranks - 1
        self.order = [(isinstance(action, Forward), action.microbatch) for action in schedule.orders[self.rank]]
        self.count, self.part, self.loss_fn = schedule.num_microbatches, part, loss_fn

    @staticmethod
    def can_run(schedule: Schedule) -> bool:
        """Whether it knows what such a schedule does."""
        kinds = {type(action).__name__ for action in schedule.orders[0]}
        return schedule.num_stages == schedule.num_ranks and kinds == {"Forward", "Backward"}

    def step(self, batch: Tensor) -> None:
        """One batch forward and backward."""
        pieces, kept, sent = batch.chunk(self.count), dict[int, tuple[Tensor, Tensor]](), list[Posted]()
        ahead = self._posted(0, pieces[0])
        for place, (is_forward, number) in enumerate(self.order):
            arrived, ahead = ahead, self._posted(place + 1, pieces[0])
            if arrived is not None:
                arrived[0].wait()
            if is_forward:
                given = arrived[1].requires_grad_() if arrived else pieces[number]
                made = self.part(given)
                if self.rank == self.last:
                    made = self.loss_fn(made, pieces[number]) / self.count
                else:
                    sent.append(_sent(made.detach(), self.rank + 1))
                kept[number] = given, made
            else:
                given, made = kept.pop(number)
                torch.autograd.backward(made, arrived[1] if arrived else None)
                if self.rank > 0 and given.grad is not None:
                    sent.append(_sent(given.grad, self.rank - 1))
        for work, _ in sent:
            work.wait()

    def _posted(self, place: int, like: Tensor) -> Posted | None:
        """Room for what a pass uses; None if it uses nothing of others, or there is no such pass."""
        if place >= len(self.order):
            return None
        peer = self.rank - 1 if self.order[place][0] else self.rank + 1
        if not 0 <= peer <= self.last:
            return None
        room = torch.empty_like(like)
        work = dist.irecv(room, peer)
        assert work is not None
        return work, room


def _sent(tensor: Tensor, peer: int) -> Posted:
    work = dist.isend(tensor, peer)
    assert work is not None
    return work, tensor
