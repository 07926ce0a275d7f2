"""Saves a training loop every few steps, and resumes it from a checkpoint."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from penstock.capture import GeneratorStates
from penstock.checkpoint.manifest import MAX_STEP
from penstock.checkpoint.reader import Loaded
from penstock.checkpoint.saving import CheckpointOptions
from penstock.errors import CheckpointError, RunError
from penstock.ir import StepMetrics, as_int

Batches = Iterable[Any] | Callable[[int], Iterable[Any]]
"""all batches in order, or a function that returns those from a given index on"""


class PeriodicSaver:
    """Saves one training loop. A checkpoint that cannot be written gives a message, and only the last one an error."""

    def __init__(
        self,
        pipe: Any,
        optimizer: Any,
        options: CheckpointOptions,
        *,
        extra: Any = None,
        on_resume: Callable[[Loaded], str] = lambda loaded: "",
    ) -> None:
        """`pipe` is a Pipeline, `extra` is saved with it.

        `on_resume` is called once the training is restored and may return a message.
        """
        self._pipe, self._optimizer, self._options, self._extra = pipe, optimizer, options, extra
        self._on_resume = on_resume
        self.on_save: Callable[[Path], None] = lambda path: None
        """called on every rank with the directory of a checkpoint that was written, or that a thread begins to write"""
        self.step: int | None = None
        """number of steps taken; None before the first one"""
        self.run_id = ""
        """identifies the run in logs; saved, so that a resumed run continues its log"""
        self._num_batches = 0
        self.num_skipped = 0
        """number of consecutive skipped steps up to now"""
        self._saved: int | None = None
        """the step of the newest checkpoint"""
        self._writing: int | None = None
        """the step of the checkpoint that a thread is writing"""
        self._error: CheckpointError | RunError | None = None
        """why the last save failed"""

    def resume(self, batches: Batches) -> tuple[Iterator[Any], str]:
        """Restore the training if `resume` is set; returns the remaining batches and a message."""
        if self._options.resume is None:
            return batches_from(batches, 0), ""
        # An iterable may draw its batches from the global generators, for example to shuffle. To skip the batches that
        # were used, they are drawn again from the state that the program starts with, as in the first run; after them
        # the saved state applies.
        fresh = GeneratorStates.of_process()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                loaded: Loaded = self._pipe.load(self._options.resume, self._optimizer)
            except (CheckpointError, RunError) as error:
                # Another attempt would find the same damaged checkpoint, or one of another model.
                error.is_final = error.is_shared or isinstance(error, CheckpointError)
                raise
        resumed = GeneratorStates.of_process()
        self._num_batches, self.num_skipped, self.run_id = _position(loaded, self.run_id)
        self.step = self._saved = loaded.step
        fresh.restore()
        left = batches_from(batches, self._num_batches)
        resumed.restore()
        messages = (*(str(warning.message) for warning in caught), self._on_resume(loaded))
        text = "".join(f"; {message}" for message in messages if message)
        return left, f"resumed from {loaded.path}, after step {loaded.step}{text}"

    def step_taken(self, metrics: StepMetrics, num_skipped: int, num_batches: int = 1) -> str:
        """Save if it is time to; returns a message if that failed.

        While steps are skipped nothing is saved: the model may be broken, and pruning would remove good checkpoints.
        """
        self._num_batches += num_batches
        self.step, self.num_skipped = metrics.step + 1, num_skipped
        is_time = self.step % self._options.every == 0 and not num_skipped
        return self._save() if is_time else ""

    def step_refused(self, error: CheckpointError | RunError) -> str:
        """Handle the error of a step: returns a message if it only reports a failed asynchronous save, else raises."""
        if self._writing is None:
            raise error
        step, self._writing = self._writing, None
        return self._failed(step, error)

    def finish(self) -> None:
        """Save the steps since the last checkpoint; raises if that fails, because they would be lost."""
        self._wait()
        if self._saved != self.step:
            self._save()
            self._wait()
        if self._saved != self.step and self._error is not None:
            problem = f"the last checkpoint was not written: {self._error.problem}"
            values = {"step": self.step, **self._error.values, "newest": self._newest}
            error = RunError(problem, hint=self._error.hint, **values)
            error.is_final = True  # all steps are taken, so a restart would not save them either
            raise error

    def _save(self) -> str:
        """Save this step; returns a message if this or an asynchronous save before it failed."""
        message, self._error = self._wait(), None
        step, options = self.step, self._options
        position = {"batches": self._num_batches, "skipped": self.num_skipped, "run_id": self.run_id}
        try:
            path = self._pipe.save(
                options.directory,
                self._optimizer,
                self._extra,
                position=position,
                keep=options.keep,
                asynchronous=options.asynchronous,
                step=step,
            )
        except (CheckpointError, RunError) as error:
            return "; ".join(filter(None, (message, self._failed(step, error))))
        if options.asynchronous:
            self._writing = step
        else:
            self._saved = step
        self.on_save(path)
        return message

    def _wait(self) -> str:
        """Wait for a running asynchronous save; returns a message if it failed."""
        if self._writing is None:
            return ""
        step, self._writing = self._writing, None
        try:
            self._pipe.wait_for_save()
        except (CheckpointError, RunError) as error:
            return self._failed(step, error)
        self._saved = step
        return ""

    def _failed(self, step: int, error: CheckpointError | RunError) -> str:
        """The message for a checkpoint that could not be written; any other error is raised."""
        if not (error.is_shared or isinstance(error, CheckpointError)):
            raise error
        self._error = error
        text = str(error).replace("\n", " ")
        return f"CHECKPOINT OF STEP {step} NOT WRITTEN, training continues; the newest is {self._newest}: {text}"

    @property
    def _newest(self) -> str:
        return "none" if self._saved is None else f"that of step {self._saved}"


def batches_from(batches: Batches, index: int) -> Iterator[Any]:
    """The batches from an index on."""
    if callable(batches):
        return iter(batches(index))
    iterator = iter(batches)
    # Advances the iterator by `index` batches, without keeping them.
    next(islice(iterator, index, index), None)
    return iterator


def _position(loaded: Loaded, run_id: str) -> tuple[int, int, str]:
    """Numbers of batches used and of steps skipped, and the id of the run, by default `run_id`.

    A checkpoint of another loop counts as one batch per step.
    """
    position = loaded.position if isinstance(loaded.position, dict) else {}
    batches, skipped = (as_int(position.get(name)) for name in ("batches", "skipped"))
    if batches is None or not 0 <= batches <= MAX_STEP:
        batches = loaded.step or 0
    saved_id = position.get("run_id")
    return batches, max(0, skipped or 0), saved_id if isinstance(saved_id, str) and saved_id else run_id
