"""Lookout: what one process notes about its steps, and who turns a broken wait into words.

A thread of its own ends the process when another rank breaks and this one would not notice; the environment variable
PENSTOCK_WATCH=0 leaves that thread out, for a process that outlives failed steps.
"""

import os
import weakref
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from penstock.errors import RunError
from penstock.launch import LARGEST_FAILURE, Board, Failure, Watch, occasion_code, shared_directory

VARIABLE = "PENSTOCK_WATCH"
FIRST_STEP_SECONDS = 600.0
"""what a first step may take at least: models are recorded, compiled, kernels chosen"""


class Lookout:
    """Notes every action on this process's board, and knows the deadline of every wait."""

    def __init__(self, ranks: Sequence[int], replicas: Sequence[int], deadline_seconds: float) -> None:
        """`ranks` are those of the pipeline, `replicas` those that hold the same stages, both as ranks of the world."""
        self._ranks = tuple(ranks)
        self._board = Board.create(shared_directory(), dist.get_rank(), dist.get_world_size())
        self._watch = Watch(self._board, deadline_seconds, sorted({*ranks, *replicas}))
        self._deadline_seconds = deadline_seconds
        self._taken: set[bool] = set()
        self.step = 0
        self._set_deadline(is_first=True)
        if os.environ.get(VARIABLE, "1") != "0":
            self._watch.start()
            weakref.finalize(self, self._watch.stop)

    def works(self, code: int) -> None:
        """This rank is about to run an action."""
        self._board.working(self.step, code)

    def waits(self, code: int, peer: int) -> None:
        """This rank waits for a message of another, given as a rank of the pipeline."""
        self._board.waiting(self.step, code, self._ranks[peer])

    def begins(self, step: int, is_training: bool) -> None:
        """A step begins; a failure of an earlier one was dealt with, or this call would not be."""
        self.step = step
        self._set_deadline(is_first=is_training not in self._taken)
        self._board.preparing(step)
        if self._board.failure:
            self._board.recovered()

    def meets(self, occasion: str, step: int) -> None:
        """This rank waits for all others to come to a meeting."""
        self.step = step
        self._board.meeting(step, occasion_code(occasion))

    def leaves(self) -> None:
        """A call that was no step is over."""
        self._board.idle(max(self.step - 1, 0))

    def rests(self, is_training: bool) -> None:
        """The step is over; from now on waits of its kind are as short as asked for."""
        self._taken.add(is_training)
        self._set_deadline(is_first=False)
        self._board.idle(self.step if is_training else max(self.step - 1, 0))

    def _set_deadline(self, is_first: bool) -> None:
        seconds = max(self._deadline_seconds, FIRST_STEP_SECONDS if is_first else 0.0)
        self.deadline = timedelta(seconds=seconds)
        self._watch.deadline_seconds = seconds

    def fails(self, error: BaseException) -> None:
        """The step broke here: the others learn why."""
        self._board.failed(Failure.of(error, self._board.rank).to_json(LARGEST_FAILURE))

    def lost(self, code: int, peer: int, error: RuntimeError) -> RunError:
        """What a broken wait for a message means."""
        return self._watch.lost(code, self._ranks[peer], error)

    def parted(self, error: RuntimeError) -> RunError:
        """What a broken meeting of all ranks means."""
        return self._watch.parted(error)
