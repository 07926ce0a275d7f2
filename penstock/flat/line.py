"""Line: the pipeline of this process: its crew, where its ranks meet, and the calls that they make together."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from penstock.errors import PenstockError, RunError
from penstock.runtime import Between, Crew, Heard, Meeting, Occasion, Said


class Line:
    """One pipeline; a call is a step of training or evaluation, counted alike on all ranks."""

    def __init__(self, crew: Crew) -> None:
        assert crew.lookout is not None
        self.crew, self._lookout = crew, crew.lookout
        self.meeting = Meeting(crew)
        self.between = Between(crew.group, _device_of(crew.group), crew.lookout)
        self.num_calls = 0
        self.replicated: dict[Any, None] | None = None
        """modules with copies on other ranks whose gradients the present call makes; None between calls"""

    @property
    def is_first(self) -> bool:
        """Whether this rank holds the first stage."""
        return self.crew.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage."""
        return self.crew.rank == self.crew.ranks - 1

    def works(self, code: int) -> None:
        """This rank is about to run an action."""
        self._lookout.works(code)

    @contextmanager
    def call(self, is_training: bool) -> Iterator[int]:
        """The number of a call; if it breaks, the error says in which, and ranks that do not know it learn of it."""
        number, self.num_calls = self.num_calls, self.num_calls + 1
        self._lookout.begins(number, is_training)
        self.replicated = {}
        try:
            yield number
        except Exception as error:
            told = error.at(step=number) if isinstance(error, RunError) else error
            if isinstance(told, PenstockError) and told.is_shared:
                self._lookout.leaves()
            else:
                self._lookout.fails(told)
            raise told from error.__cause__
        finally:
            self.replicated = None
        self._lookout.rests(is_training)

    def agree(self, occasion: Occasion, said: Said) -> Heard:
        """All ranks were called alike, or all of them raise."""
        return self.meeting.hold(occasion, said)

    def refuse(self, occasion: Occasion, error: RunError) -> RunError:
        """Tell the other ranks, who are at this meeting, why this rank will not do it; the error to raise here."""
        self.meeting.refuse(occasion, error)
        told = error.at(rank=self.crew.rank)
        told.is_shared = True
        return told


def _device_of(group: Any) -> torch.device:
    """Where messages of the group lie."""
    is_nccl = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")
