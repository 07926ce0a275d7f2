"""Keeping: the checkpoints that a loop writes while it trains, and where it goes on."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from penstock.api.pipeline import Pipeline
from penstock.checkpoint import Loaded, random_state, restorer
from penstock.errors import CheckpointError, RunError
from penstock.ir import StepMetrics, as_int

Batches = Iterable[Any] | Callable[[int], Iterable[Any]]
"""all batches in order, or what gives those from one on, by its number"""
_BATCHES, _SKIPPED = "batches", "skipped"


@dataclass(frozen=True)
class Keeping:
    """What is kept of a training while it goes on."""

    directory: Path
    every: int = 100
    """how many steps lie between two checkpoints"""
    keep: int | None = None
    """how many of the newest stay; None: all"""
    resume: Path | None = None
    """what to go on from; None: begin"""
    asynchronous: bool = False
    """whether checkpoints are written while training goes on"""
    extra: Any = None
    """what else a checkpoint keeps"""
    resumed: Callable[[Loaded], str] = lambda loaded: ""
    """is shown what was read, once the training is where it was; a remark"""
    taken: Callable[[StepMetrics], None] = lambda figures: None
    """is shown every step on the first rank before it is saved: what goes on after it does not take it again"""

    def __post_init__(self) -> None:
        for name in ("every", "keep"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise CheckpointError(f"{name} is a whole number above 0", given=count)


class Keeper:
    """Saves one training, and begins where an earlier one ended."""

    def __init__(self, pipe: Pipeline, optimizer: Any, keeping: Keeping) -> None:
        self._pipe, self._optimizer, self._keeping = pipe, optimizer, keeping
        self._num_batches = 0
        self.num_skipped = 0
        """how many steps in a row were left out, up to now"""
        self._saved: int | None = None
        self._begun: int | None = None
        """the step of the checkpoint that is being written beside the steps"""
        self._problem: CheckpointError | RunError | None = None

    def begun(self, batches: Batches) -> tuple[Iterator[Any], str]:
        """The batches that are left, once the training is where it was; and a remark about that."""
        if self._keeping.resume is None:
            return batches_from(batches, 0), ""
        # Batches may be drawn at random: those that were had are drawn as they were, and the next ones follow them.
        fresh = random_state()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loaded = self._loaded(self._keeping.resume)
        resumed = random_state()
        self._num_batches, self.num_skipped = _position(loaded)
        self._saved = loaded.step
        restorer(fresh)()
        left = batches_from(batches, self._num_batches)
        restorer(resumed)()
        told = (*(str(warning.message) for warning in caught), self._keeping.resumed(loaded))
        words = "".join(f"; {one}" for one in told if one)
        return left, f"went on from {loaded.path}, after step {loaded.step}{words}"

    def _loaded(self, source: Path) -> Loaded:
        try:
            return self._pipe.load(source, self._optimizer)
        except (CheckpointError, RunError) as error:
            # Of another model, or damaged: it would be so again.
            error.is_final = error.is_shared or isinstance(error, CheckpointError)
            raise

    def stepped(self, figures: StepMetrics, num_skipped: int) -> str:
        """A step was taken: save if it is time to; a remark if that failed. Training goes on without.

        While steps are left out nothing is saved: it could be the model that is broken, and good ones would be pruned.
        """
        if self._pipe.is_first:
            self._keeping.taken(figures)
        self._num_batches += 1
        self.num_skipped = num_skipped
        is_time = self._pipe.num_steps % self._keeping.every == 0 and not num_skipped
        return self._save() if is_time else ""

    def refused(self, error: CheckpointError | RunError) -> str:
        """A step was not taken: a remark if only the checkpoint before could not be written, else the error itself."""
        if self._begun is None:
            raise error
        step, self._begun = self._begun, None
        return self._failed(step, error)

    def finish(self) -> None:
        """Save what was done since the last checkpoint; an error if it is lost otherwise."""
        self._settled()
        if self._saved != self._pipe.num_steps:
            self._save()
            self._settled()
        if self._saved != self._pipe.num_steps and self._problem is not None:
            problem = f"the last checkpoint was not written: {self._problem.problem}"
            values = {"step": self._pipe.num_steps, **self._problem.values, "newest": self._newest}
            error = RunError(problem, hint=self._problem.hint, **values)
            error.is_final = True  # all steps are taken: what was not saved is not trained again
            raise error

    def _save(self) -> str:
        remark, self._problem = self._settled(), None
        step, keeping = self._pipe.num_steps, self._keeping
        options: dict[str, Any] = {"keep": keeping.keep, "asynchronous": keeping.asynchronous}
        position = {_BATCHES: self._num_batches, _SKIPPED: self.num_skipped}
        try:
            self._pipe.save(keeping.directory, self._optimizer, keeping.extra, position=position, **options)
        except (CheckpointError, RunError) as error:
            return "; ".join(filter(None, (remark, self._failed(step, error))))
        if keeping.asynchronous:
            self._begun = step
        else:
            self._saved = step
        return remark

    def _settled(self) -> str:
        """Wait for what is being written beside the steps; a remark if it could not be."""
        if self._begun is None:
            return ""
        step, self._begun = self._begun, None
        try:
            self._pipe.wait_for_save()
        except (CheckpointError, RunError) as error:
            return self._failed(step, error)
        self._saved = step
        return ""

    def _failed(self, step: int, error: CheckpointError | RunError) -> str:
        """What is said where a checkpoint could not be written; what else went wrong is raised."""
        if not (error.is_shared or isinstance(error, CheckpointError)):
            raise error
        self._problem = error
        words = str(error).replace("\n", " ")
        return f"CHECKPOINT OF STEP {step} NOT WRITTEN, training goes on; the newest is {self._newest}: {words}"

    @property
    def _newest(self) -> str:
        return "none" if self._saved is None else f"that of step {self._saved}"


def batches_from(batches: Batches, number: int) -> Iterator[Any]:
    """The batches from one on."""
    if callable(batches):
        return iter(batches(number))
    found = iter(batches)
    next(islice(found, number, number), None)
    return found


def _position(loaded: Loaded) -> tuple[int, int]:
    """How many batches were taken, and of the last steps left out; what was saved by other means had one per step."""
    position = loaded.position if isinstance(loaded.position, dict) else {}
    batches, skipped = (as_int(position.get(name)) for name in (_BATCHES, _SKIPPED))
    is_known = batches is not None and batches >= 0
    return batches if is_known else loaded.step or 0, max(0, skipped or 0)
