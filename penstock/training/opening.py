"""Opening: the beginning of a step, at which its batch is looked at and all ranks agree on what they are about to do.

Where every rank has the batch, they show each other the form of it that they see, and the first messages wait for the
answer. Where only rank 0 has it, the ranks meet first, then take their parts; a kind of batch that is new is agreed on.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from penstock.errors import PenstockError, RunError
from penstock.runtime.checksum import checksum
from penstock.runtime.gate import Gate
from penstock.runtime.meeting import Meeting, Occasion, Said
from penstock.runtime.row import Figures
from penstock.runtime.seeds import mix
from penstock.training.batch_cutter import BatchCutter
from penstock.training.course import Course
from penstock.training.first_inputs import FirstInputs
from penstock.training.model_part import ModelPart
from penstock.training.options import RunOptions
from penstock.training.step_data import CutBatch, Inputs, StepData

Batch = tuple[Any, Any, Any]
Begun = tuple[StepData, Course]
CourseOf = Callable[[CutBatch, bool], Course]
_NEW_FORM = "the form of a batch"
Found = TypeVar("Found")


class Opening:
    """Takes in batches; `course_of` says how a batch is run."""

    def __init__(
        self,
        part: ModelPart,
        meeting: Meeting,
        cutter: BatchCutter,
        gate: Gate | None,
        course_of: CourseOf,
        options: RunOptions,
    ) -> None:
        self._part, self._meeting, self._cutter, self._gate = part, meeting, cutter, gate
        self._course_of, self._options = course_of, options
        self._first = FirstInputs(part, cutter) if cutter.is_handed_out else None
        self._agreed: set[tuple[int, bool]] = set()

    def lacks_target(self, data: StepData) -> bool:
        """Whether there is a loss function, and nothing for it to compare with."""
        return self._cutter.has_loss_fn and data.inputs.microbatches[0].target is None

    def begin(self, batch: Batch, occasion: Occasion, is_training: bool, keeps_outputs: bool) -> Begun:
        """What a step works on and the way to run it; raises on every rank alike if one of them cannot take it."""
        if self._first is None:
            inputs, course = self._given(batch, occasion, is_training)
        else:
            inputs, course = self._handed_out(self._first, batch, occasion, is_training)
        return StepData(inputs, is_training, keeps_outputs), course

    def _given(self, batch: Batch, occasion: Occasion, is_training: bool) -> tuple[Inputs, Course]:
        def look() -> tuple[CutBatch, Course, int]:
            pieces = self._cutter.cut(self._cutter.placed(batch))
            every = self._options.check_inputs_every
            looks = every and occasion.step % every == 0 and not self._part.crew.is_alone
            return pieces, self._course_of(pieces, is_training), checksum(self._cutter.content(pieces)) if looks else 0

        pieces, course, content = self._attempt(look, occasion)
        size = float(sum(piece.size for piece in pieces.microbatches))
        self._meeting.begin(occasion, Said(course.form, content, self._size(size)))
        if self._gate is not None:
            self._gate.close(self._meeting.end)
        else:
            size = self._mean(self._meeting.end().figures)
        return self._inputs(pieces, occasion.step, size), course

    def _handed_out(
        self, first: FirstInputs, batch: Batch, occasion: Occasion, is_training: bool
    ) -> tuple[Inputs, Course]:
        offer = None
        if self._part.crew.rank == 0:
            offer = self._attempt(lambda: first.offer(self._cutter.placed(batch)), occasion)
        size = 0.0 if offer is None else float(sum(piece.size for piece in offer.cut.microbatches))
        said = Said(figures=self._size(size), content=() if offer is None else (float(offer.number),))
        heard = self._meeting.hold(occasion, said)
        number = int(heard.content(0)[0])

        def look() -> tuple[CutBatch, Course]:
            pieces = first.take(number) if offer is None else first.give(offer)
            return pieces, self._course_of(pieces, is_training)

        if (number, is_training) in self._agreed:
            pieces, course = look()
        else:
            new = Occasion(_NEW_FORM, occasion.step)
            pieces, course = self._attempt(look, new)
            self._meeting.hold(new, Said(course.form))
            first.learn()
            self._agreed.add((number, is_training))
        return self._inputs(pieces, occasion.step, self._mean(heard.figures)), course

    def _attempt(self, look: Callable[[], Found], occasion: Occasion) -> Found:
        """Look at a batch; what this rank cannot take, all others hear of."""
        try:
            return look()
        except Exception as error:
            told = error if isinstance(error, PenstockError) else RunError(f"{type(error).__name__}: {error}")
            self._meeting.refuse(occasion, told)
            if isinstance(told, RunError) and not self._part.crew.is_alone:
                told = told.at(rank=self._part.crew.rank)
            told.is_shared = True
            raise told from (error.__cause__ if isinstance(error, PenstockError) else error)

    def _size(self, size: float) -> Figures:
        """The samples of this pipeline, said by one of its ranks."""
        return Figures(sums=(size if self._part.crew.rank == 0 else 0.0,))

    def _mean(self, figures: Figures) -> float:
        return figures.sums[0] / self._part.crew.num_replicas

    def _inputs(self, pieces: CutBatch, step: int, mean_size: float) -> Inputs:
        return Inputs(*pieces, mix(self._options.seed, step, self._part.crew.replica), mean_size)
