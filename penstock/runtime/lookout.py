"""Lookout: what one process notes about its steps, and who turns a broken wait into words.

A thread of its own ends the process when another rank breaks and this one would not notice; the environment variable
PENSTOCK_WATCH=0 leaves that thread out, for a process that outlives failed steps.
"""

import os
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from penstock.errors import RunError
from penstock.processes.board import LARGEST_FAILURE, Board
from penstock.processes.failure import Failure
from penstock.processes.meeting import shared_directory
from penstock.processes.watch import Watch

VARIABLE = "PENSTOCK_WATCH"
FIRST_STEP_SECONDS = 600.0
"""what a first step may take at least: models are recorded, compiled, kernels chosen"""


class Lookout:
    """Notes every action on this process's board, and knows the deadline of every wait."""

    def __init__(self, group: Any, deadline_seconds: float) -> None:
        ranks = [dist.get_global_rank(group, rank) for rank in range(dist.get_world_size(group))]
        self._ranks = ranks
        self._board = Board.create(shared_directory(), dist.get_rank(), dist.get_world_size())
        self._watch = Watch(self._board, deadline_seconds, ranks)
        self._deadline_seconds = deadline_seconds
        self.deadline = timedelta(seconds=max(deadline_seconds, FIRST_STEP_SECONDS))
        self.step = 0
        if os.environ.get(VARIABLE, "1") != "0":
            self._watch.start()
            weakref.finalize(self, self._watch.stop)

    def works(self, code: int) -> None:
        """This rank is about to run an action."""
        self._board.working(self.step, code)

    def waits(self, code: int, peer: int) -> None:
        """This rank waits for a message of another, given as a rank of the pipeline."""
        self._board.waiting(self.step, code, self._ranks[peer])

    def begins(self, step: int) -> None:
        """A step begins; a failure of an earlier one was dealt with, or this call would not be."""
        self.step = step
        if self._board.failure:
            self._board.recovered()

    def rests(self) -> None:
        """The step is over; from now on waits are as short as asked for."""
        self._board.idle(self.step)
        self.deadline = timedelta(seconds=self._deadline_seconds)

    def fails(self, error: BaseException) -> None:
        """The step broke here: the others learn why."""
        self._board.failed(Failure.of(error, self._board.rank).to_json(LARGEST_FAILURE))

    def lost(self, code: int, peer: int, error: RuntimeError) -> RunError:
        """What a broken wait for a message means."""
        return self._watch.lost(code, self._ranks[peer], error)

    def parted(self, error: RuntimeError) -> RunError:
        """What a broken meeting of all ranks means."""
        return self._watch.parted(error)
