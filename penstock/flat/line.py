"""Line: the pipeline of this process: its groups, where its ranks meet, and the calls that they make together."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from penstock.errors import RunError
from penstock.runtime import (
    DistributedTransport,
    ProcessGroups,
    RankSync,
    SyncRequest,
    SyncResult,
    SyncVote,
    watch_step,
)


class Line:
    """One pipeline; a call is a step of training or evaluation, counted alike on all ranks."""

    def __init__(self, groups: ProcessGroups) -> None:
        assert groups.monitor is not None
        self.groups, self._monitor = groups, groups.monitor
        self.sync = RankSync(groups)
        self.between = DistributedTransport(groups.group, _device_of(groups.group), groups.monitor)
        self.num_calls = 0
        self.replicated: dict[Any, None] | None = None
        """modules with copies on other ranks whose gradients the present call makes; None between calls"""

    @property
    def is_first(self) -> bool:
        """Whether this rank holds the first stage."""
        return self.groups.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage."""
        return self.groups.rank == self.groups.num_ranks - 1

    def works(self, code: int) -> None:
        """This rank is about to run an action."""
        self._monitor.working(code)

    @contextmanager
    def call(self, is_training: bool) -> Iterator[int]:
        """The number of a call; if it breaks, the error says in which, and ranks that do not know it learn of it."""
        number, self.num_calls = self.num_calls, self.num_calls + 1
        self.replicated = {}
        try:
            with watch_step(self._monitor, number, is_training):
                yield number
        finally:
            self.replicated = None

    def agree(self, request: SyncRequest, said: SyncVote) -> SyncResult:
        """All ranks were called alike, or all of them raise."""
        return self.sync.exchange(request, said)

    def refuse(self, request: SyncRequest, error: RunError) -> RunError:
        """Tell the other ranks, who are at this sync, why this rank will not do it; the error to raise here."""
        self.sync.refuse(request, error)
        told = error.at(rank=self.groups.rank)
        told.is_shared = True
        return told


def _device_of(group: Any) -> torch.device:
    """Where messages of the group lie."""
    is_nccl = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")
