"""A minimal pipeline runtime over isend and irecv, for one stage per rank with full backwards.

It checks nothing. Its CPU time is the lower limit for any runtime that uses these calls.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.ir import Forward, Schedule

Message = tuple[dist.Work, Tensor]


class BareLoop:
    """Runs the order of this rank; receives are posted one pass ahead."""

    def __init__(self, schedule: Schedule, part: nn.Module, loss_fn: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.rank, self.last = dist.get_rank(), schedule.num_ranks - 1
        self.order = [(isinstance(action, Forward), action.microbatch) for action in schedule.orders[self.rank]]
        self.count, self.part, self.loss_fn = schedule.num_microbatches, part, loss_fn

    @staticmethod
    def can_run(schedule: Schedule) -> bool:
        """Whether the schedule has one stage per rank and full backwards."""
        kinds = {type(action).__name__ for action in schedule.orders[0]}
        return schedule.num_stages == schedule.num_ranks and kinds == {"Forward", "Backward"}

    def step(self, batch: Tensor) -> None:
        """Runs forward and backward of one batch."""
        microbatches, kept, sent = batch.chunk(self.count), dict[int, tuple[Tensor, Tensor]](), list[Message]()
        following = self._post_receive(0, microbatches[0])
        for place, (is_forward, number) in enumerate(self.order):
            received, following = following, self._post_receive(place + 1, microbatches[0])
            if received is not None:
                received[0].wait()
            if is_forward:
                x = received[1].requires_grad_() if received else microbatches[number]
                output = self.part(x)
                if self.rank == self.last:
                    output = self.loss_fn(output, microbatches[number]) / self.count
                else:
                    sent.append(_send(output.detach(), self.rank + 1))
                kept[number] = x, output
            else:
                x, output = kept.pop(number)
                torch.autograd.backward(output, received[1] if received else None)
                if self.rank > 0 and x.grad is not None:
                    sent.append(_send(x.grad, self.rank - 1))
        for work, _ in sent:
            work.wait()

    def _post_receive(self, place: int, like: Tensor) -> Message | None:
        """Posts the receive of a pass; returns None if the pass receives nothing, or if there is no such pass."""
        if place >= len(self.order):
            return None
        peer = self.rank - 1 if self.order[place][0] else self.rank + 1
        if not 0 <= peer <= self.last:
            return None
        buffer = torch.empty_like(like)
        work = dist.irecv(buffer, peer)
        assert work is not None
        return work, buffer


def _send(tensor: Tensor, peer: int) -> Message:
    work = dist.isend(tensor, peer)
    assert work is not None
    return work, tensor
