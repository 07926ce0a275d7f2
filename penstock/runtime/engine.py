"""Engine: takes steps of a plan over the part of this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from penstock.errors import PenstockError, RunError
from penstock.passes import DEFAULT_PASSES
from penstock.runtime.batch_cutter import BatchCutter
from penstock.runtime.between import Between
from penstock.runtime.closing import Closing
from penstock.runtime.course import Course, Courses, StepKind
from penstock.runtime.ending import Ending
from penstock.runtime.execute import execute, execute_together
from penstock.runtime.gate import Gate
from penstock.runtime.inside import Inside
from penstock.runtime.meeting import Meeting, Occasion
from penstock.runtime.model_part import ModelPart
from penstock.runtime.opening import Opening
from penstock.runtime.options import RunOptions
from penstock.runtime.player import Player
from penstock.runtime.result import Result
from penstock.runtime.seeds import untouched_generators
from penstock.runtime.step_data import CutBatch, StepData
from penstock.runtime.times import Times
from penstock.runtime.witness import Witness

Batch = tuple[Any, Any, Any]


class Engine:
    """Runs loads over courses and brings results home."""

    def __init__(
        self, part: ModelPart, meeting: Meeting, ending: Ending, cutter: BatchCutter, options: RunOptions
    ) -> None:
        plan, crew = cutter.plan, part.crew
        self._crew, self._part, self._ending = crew, part, ending
        self._player = Player(part, plan.num_stages - 1, ending)
        self._gate = _gate(part)
        ranks = range(plan.num_ranks) if crew.is_alone else (crew.rank,)
        passes = (*DEFAULT_PASSES, "add_shard_moves") if part.shards.are_there else DEFAULT_PASSES
        self._courses = Courses(plan, ranks, self._player, self._gate, passes)
        # What replicas do together comes before any message, and does not pass the gate.
        is_late = crew.lookout is not None and crew.replicas is None
        self._opening = Opening(part, meeting, cutter, self._gate if is_late else None, self._course_of, options)
        self._closing = Closing(part, meeting, ending, options, plan)

    def train(self, batch: Batch, step: int, keeps_outputs: bool, records: bool) -> Result:
        """Forward and backward of one batch (args, kwargs, target)."""
        occasion = Occasion("step", step, _options(return_outputs=keeps_outputs, record=records))
        with self._watched(step, True):
            data, course = self._opening.begin(batch, occasion, True, keeps_outputs)
            self._part.begin(len(data.inputs.microbatches))
            try:
                times = self._run(course, data, records)
                self._part.finish()
                result = self._closing.bring(data, course, times, step, lambda: self._look_again(course, data))
            except BaseException:
                self._part.restore()
                raise
            if result.skipped:
                self._part.restore()
            else:
                self._part.settle()
            return result

    def _look_again(self, course: Course, data: StepData) -> Witness:
        """Run a step once more from where it began, on every rank, and look at everything; it ends like the first."""
        self._part.restore()
        self._part.begin(len(data.inputs.microbatches))
        with Witness(self._part.stages).looking() as witness:
            self._player.witness = witness
            try:
                self._run(course, data.again(), False)
            finally:
                self._player.witness = None
            self._part.finish()
        return witness

    def evaluate(self, batch: Batch, step: int, keeps_outputs: bool) -> Result:
        """Forward of one batch in eval mode, without gradients."""
        occasion = Occasion("eval", step, _options(return_outputs=keeps_outputs))
        with self._watched(step, False), torch.no_grad(), self._evaluating():
            data, course = self._opening.begin(batch, occasion, False, keeps_outputs)
            self._run(course, data, False)
            return self._closing.bring(data, course, None, step, None)

    def _course_of(self, batch: CutBatch, is_training: bool) -> Course:
        roots = tuple(self._ending.roots(recording, is_training) for recording in batch.recordings)
        return self._courses.of(StepKind(is_training, batch.recordings, roots))

    def _run(self, course: Course, data: StepData, records: bool) -> list[Times] | None:
        times = [Times() for _ in course.prepared] if records else None
        lookout = self._crew.lookout
        self._player.load = data
        try:
            with untouched_generators():
                if lookout is None:
                    execute_together(course.prepared, _nobody, times)
                else:
                    execute(course.prepared[0], lookout.works, times[0] if times else None)
                for prepared in course.prepared:
                    prepared.settle()
                self._gate.open()
        except BaseException as error:
            course.clear()
            if self._gate.problem is not None:
                # The ranks do not agree: that is not the fault of the action that asked first.
                raise self._gate.problem from None
            if isinstance(error, RunError) and self._may_lack_target(error, data):
                raise error.with_hint(
                    "pipe.step(x, target=y), if the loss function needs a target"
                ) from error.__cause__
            raise
        finally:
            self._player.load = None
        return times

    def _may_lack_target(self, error: RunError, data: StepData) -> bool:
        """Whether the failure could be that of a loss function that was given None for its target."""
        is_python = isinstance(error.__cause__, TypeError | AttributeError)
        return is_python and not error.hint and self._opening.lacks_target(data)

    @contextmanager
    def _watched(self, step: int, is_training: bool) -> Iterator[None]:
        """Errors say in which step they happened, and other ranks learn of those that they do not know."""
        lookout = self._crew.lookout
        if lookout is not None:
            lookout.begins(step, is_training)
        try:
            yield
        except Exception as error:
            told = error.at(step=step) if isinstance(error, RunError) else error
            if lookout is not None and isinstance(told, PenstockError) and told.is_shared:
                lookout.leaves()
            elif lookout is not None:
                lookout.fails(told)
            raise told from error.__cause__
        if lookout is not None:
            lookout.rests(is_training)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        model = self._part.captured.model
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        try:
            yield
        finally:
            for module, was_training in modes:
                module.training = was_training


def _options(**given: bool) -> str:
    """Those that were switched on, as the user would write them."""
    return ", ".join(f"{name}=True" for name, is_on in given.items() if is_on)


def _gate(part: ModelPart) -> Gate:
    crew = part.crew
    if crew.is_alone or crew.lookout is None:
        return Gate(Inside(part.device))
    return Gate(Between(crew.group, part.device, crew.lookout))


def _nobody(code: int) -> None:
    """Nobody looks on inside one process."""
