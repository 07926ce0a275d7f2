"""The pipeline of this process: its process groups, engine, and the calls its ranks make together."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.errors import RunError
from penstock.launch import group_device
from penstock.runtime import (
    ProcessGroups,
    SyncRequest,
    SyncResult,
    SyncVote,
    UserStageEngine,
    watch_step,
)


class FlatPipeline:
    """One pipeline; a call is one training or evaluation step, numbered on all ranks."""

    def __init__(self, groups: ProcessGroups) -> None:
        assert groups.monitor is not None
        self.groups, self._monitor = groups, groups.monitor
        self.engine = UserStageEngine(groups, group_device(groups.group), groups.num_ranks)
        self.sync = self.engine.sync
        self.num_calls = 0
        self.replicated: dict[Any, None] | None = None
        """DDP modules that computed gradients in the present call; None between calls"""

    @property
    def is_first(self) -> bool:
        """Whether this rank has the first stage."""
        return self.groups.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage."""
        return self.groups.rank == self.groups.num_ranks - 1

    @contextmanager
    def call(self, is_training: bool) -> Iterator[int]:
        """Run a call and yield its number; an error names the call and is reported to the other ranks."""
        number, self.num_calls = self.num_calls, self.num_calls + 1
        self.replicated = {}
        try:
            with watch_step(self._monitor, number, is_training):
                yield number
        finally:
            self.replicated = None

    def agree(self, request: SyncRequest, vote: SyncVote) -> SyncResult:
        """Synchronise all ranks; all of them raise if their requests differ."""
        return self.sync.exchange(request, vote)

    def refuse(self, request: SyncRequest, error: RunError) -> RunError:
        """Report an error to the other ranks at this sync; returns the error to raise on this rank."""
        self.sync.refuse(request, error)
        shared = error.at(rank=self.groups.rank)
        shared.is_shared = True
        return shared
