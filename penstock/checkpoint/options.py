"""Checkpoint options, the same for `Pipeline.save`, the training loop and `penstock train`."""

import os
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import CheckpointError
from penstock.ir import as_int


@dataclass(frozen=True)
class CheckpointOptions:
    """Where and how often checkpoints are written, how many are kept, and what to resume from."""

    directory: Path
    every: int = 100
    """steps between two checkpoints of a training loop"""
    keep: int | None = None
    """number of newest checkpoints to keep; None: all"""
    asynchronous: bool = False
    """whether a thread writes while training continues"""
    resume: Path | None = None
    """a checkpoint, or a directory of checkpoints, to resume from; None: start from the beginning"""

    def __post_init__(self) -> None:
        if not isinstance(self.directory, str | os.PathLike):
            raise CheckpointError("the checkpoint directory must be a path", given=repr(self.directory))
        object.__setattr__(self, "directory", Path(self.directory))
        for name in ("every", "keep"):
            value = getattr(self, name)
            count = as_int(value)
            if (count is None or count < 1) and not (name == "keep" and value is None):
                raise CheckpointError(f"{name} must be a positive integer", given=repr(value))
        if not isinstance(self.asynchronous, bool):
            raise CheckpointError("asynchronous must be True or False", given=repr(self.asynchronous))
