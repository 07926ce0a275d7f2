"""Engine: takes steps of a plan over the part of this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from penstock.errors import RunError
from penstock.passes import DEFAULT_PASSES
from penstock.runtime.batch_cutter import BatchCutter
from penstock.runtime.closing import Closing
from penstock.runtime.course import Course, Courses, StepKind
from penstock.runtime.execute import execute, execute_together
from penstock.runtime.loss_head import LossHead
from penstock.runtime.model_part import ModelPart
from penstock.runtime.monitor import watch_step
from penstock.runtime.opening import Opening
from penstock.runtime.options import RunOptions
from penstock.runtime.player import Player
from penstock.runtime.result import Result
from penstock.runtime.seeds import untouched_generators
from penstock.runtime.step_data import CutBatch, StepData
from penstock.runtime.sync import RankSync, SyncRequest
from penstock.runtime.times import Times
from penstock.runtime.transports import make_transport
from penstock.runtime.witness import Witness

Batch = tuple[Any, Any, Any]


class Engine:
    """Runs loads over courses and brings results home."""

    def __init__(
        self, part: ModelPart, sync: RankSync, ending: LossHead, cutter: BatchCutter, options: RunOptions
    ) -> None:
        plan, groups = cutter.plan, part.groups
        self._groups, self._part, self._ending = groups, part, ending
        self._player = Player(part, plan.num_stages - 1, ending)
        self._gate = make_transport(groups, part.device)
        ranks = range(plan.num_ranks) if groups.is_local else (groups.rank,)
        passes = (*DEFAULT_PASSES, "add_shard_moves") if part.shards.are_there else DEFAULT_PASSES
        self._courses = Courses(plan, ranks, self._player, self._gate, passes)
        # What replicas do together comes before any message, and does not pass the gate.
        is_late = groups.monitor is not None and groups.replicas is None
        self._opening = Opening(part, sync, cutter, self._gate if is_late else None, self._course_of, options)
        self._closing = Closing(part, sync, ending, options, plan)

    def train(self, batch: Batch, step: int, keeps_outputs: bool, records: bool) -> Result:
        """Forward and backward of one batch (args, kwargs, target)."""
        request = SyncRequest("step", step, _options(return_outputs=keeps_outputs, record=records))
        with watch_step(self._groups.monitor, step, True):
            data, course = self._opening.begin(batch, request, True, keeps_outputs)
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
        request = SyncRequest("eval", step, _options(return_outputs=keeps_outputs))
        with watch_step(self._groups.monitor, step, False), torch.no_grad(), self._evaluating():
            data, course = self._opening.begin(batch, request, False, keeps_outputs)
            self._run(course, data, False)
            return self._closing.bring(data, course, None, step, None)

    def _course_of(self, batch: CutBatch, is_training: bool) -> Course:
        roots = tuple(self._ending.roots(recording, is_training) for recording in batch.recordings)
        return self._courses.of(StepKind(is_training, batch.recordings, roots))

    def _run(self, course: Course, data: StepData, records: bool) -> list[Times] | None:
        times = [Times() for _ in course.prepared] if records else None
        monitor = self._groups.monitor
        self._player.load = data
        try:
            with untouched_generators():
                if monitor is None:
                    execute_together(course.prepared, _nobody, times)
                else:
                    execute(course.prepared[0], monitor.working, times[0] if times else None)
                for prepared in course.prepared:
                    prepared.settle()
                self._gate.run_check()
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


def _nobody(code: int) -> None:
    """Nobody looks on inside one process."""
