"""Engine: takes steps of a plan over the holdings of this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from penstock.errors import RunError
from penstock.ir.plan import Plan
from penstock.passes import DEFAULT_PASSES
from penstock.runtime.agreement import agree
from penstock.runtime.checksum import checksum
from penstock.runtime.execute import execute, execute_together
from penstock.runtime.seeds import untouched_generators
from penstock.runtime.times import Times
from penstock.runtime.transport import Between, Inside, Transport
from penstock.training.course import Course, Courses, StepKind
from penstock.training.ending import Ending
from penstock.training.holdings import Holdings
from penstock.training.homecoming import Homecoming
from penstock.training.intake import Intake
from penstock.training.load import Load
from penstock.training.options import RunOptions
from penstock.training.player import Player
from penstock.training.result import Result

Batch = tuple[Any, Any, Any]


class Engine:
    """Runs loads over courses and brings results home."""

    def __init__(self, plan: Plan, holdings: Holdings, ending: Ending, intake: Intake, options: RunOptions) -> None:
        self._crew, self._holdings, self._intake, self._options = holdings.crew, holdings, intake, options
        self._ending = ending
        self._player = Player(holdings, plan.num_stages - 1, ending)
        ranks = range(plan.num_ranks) if self._crew.is_alone else (self._crew.rank,)
        passes = (*DEFAULT_PASSES, "add_shard_moves") if holdings.shards.are_there else DEFAULT_PASSES
        self._courses = Courses(plan, ranks, self._player, _transport(holdings), passes)
        self._homecoming = Homecoming(holdings, ending, options, plan)

    def train(self, batch: Batch, step: int, keeps_outputs: bool, records: bool) -> Result:
        """Forward and backward of one batch (args, kwargs, target)."""
        with self._watched(step):
            load, course = self._prepared(batch, True, step, keeps_outputs)
            self._holdings.begin(len(load.inputs.microbatches))
            try:
                times = self._run(course, load, records)
                self._holdings.finish()
                return self._homecoming.bring(load, course, times, step)
            finally:
                # Also after a failure: what earlier steps had accumulated is not lost.
                self._holdings.settle()

    def evaluate(self, batch: Batch, step: int, keeps_outputs: bool) -> Result:
        """Forward of one batch in eval mode, without gradients."""
        with self._watched(step), torch.no_grad(), self._evaluating():
            load, course = self._prepared(batch, False, step, keeps_outputs)
            self._run(course, load, False)
            return self._homecoming.bring(load, course, None, step)

    def _prepared(self, batch: Batch, is_training: bool, step: int, keeps: bool) -> tuple[Load, Course]:
        load = self._intake.load(batch, is_training, step, keeps)
        roots = tuple(self._ending.roots(recording, is_training) for recording in load.inputs.recordings)
        course = self._courses.of(StepKind(is_training, load.inputs.recordings, roots))
        every = self._options.check_inputs_every
        looks = self._intake.everyone_has_it and every and step % every == 0
        agree(self._crew, step, course.form, checksum(load.inputs.content) if looks else 0)
        return load, course

    def _run(self, course: Course, load: Load, records: bool) -> list[Times] | None:
        times = [Times() for _ in course.prepared] if records else None
        lookout = self._crew.lookout
        self._player.load = load
        try:
            with untouched_generators():
                if lookout is None:
                    execute_together(course.prepared, _nobody, times)
                else:
                    execute(course.prepared[0], lookout.works, times[0] if times else None)
                for prepared in course.prepared:
                    prepared.settle()
        except BaseException:
            course.clear()
            raise
        finally:
            self._player.load = None
        return times

    @contextmanager
    def _watched(self, step: int) -> Iterator[None]:
        """Errors say in which step they happened, and other ranks learn of them."""
        lookout = self._crew.lookout
        if lookout is not None:
            lookout.begins(step)
        try:
            yield
        except Exception as error:
            told = error.at(step=step) if isinstance(error, RunError) else error
            if lookout is not None:
                lookout.fails(told)
            raise told from error.__cause__
        if lookout is not None:
            lookout.rests()

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        model = self._holdings.captured.model
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        try:
            yield
        finally:
            for module, was_training in modes:
                module.training = was_training


def _transport(holdings: Holdings) -> Transport:
    crew = holdings.crew
    if crew.is_alone or crew.lookout is None:
        return Inside(holdings.device)
    return Between(crew.group, holdings.device, crew.lookout)


def _nobody(code: int) -> None:
    """Nobody looks on inside one process."""
