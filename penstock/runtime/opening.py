"""Opening: the beginning of a step, at which its batch is looked at and all ranks agree on what they are about to do.

Where every rank has the batch, they show each other the form of it that they see, and the first messages wait for the
answer. Where only rank 0 has it, the ranks meet first, then take their parts; a kind of batch that is new is agreed on.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from penstock.errors import PenstockError, RunError
from penstock.runtime.agreement import Form
from penstock.runtime.batch_cutter import BatchCutter
from penstock.runtime.checksum import checksum
from penstock.runtime.course import Course
from penstock.runtime.first_inputs import FirstInputs, Offer
from penstock.runtime.gate import Gate
from penstock.runtime.meeting import Meeting, Occasion, Said
from penstock.runtime.model_part import ModelPart
from penstock.runtime.options import RunOptions
from penstock.runtime.row import Figures
from penstock.runtime.seeds import mix
from penstock.runtime.step_data import CutBatch, Inputs, StepData

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
        size, has_loss = self._load_of(pieces, course)
        says = self._part.crew.rank == 0
        self._meeting.begin(occasion, Said(course.form, content, Figures((size, has_loss) if says else (0.0, 0.0))))
        if self._gate is not None:
            self._gate.close(self._meeting.end)
        else:
            size = self._mean(self._meeting.end().figures)
        return self._inputs(pieces, occasion.step, size), course

    def _handed_out(
        self, first: FirstInputs, batch: Batch, occasion: Occasion, is_training: bool
    ) -> tuple[Inputs, Course]:
        offer, said = None, Said(figures=Figures((0.0, 0.0), (0.0,)))
        if self._part.crew.rank == 0:

            def offered() -> tuple[Offer, Said]:
                found = first.offer(self._cutter.placed(batch))
                return found, self._offered(found, self._course_of(found.cut, is_training))

            offer, said = self._attempt(offered, occasion)
        heard = self._meeting.hold(occasion, said._replace(form=self._settings(first)))
        number = int(heard.content(0)[0])

        def look() -> tuple[CutBatch, Course]:
            pieces = first.take(number) if offer is None else first.give(offer)
            return pieces, self._course_of(pieces, is_training)

        if heard.figures.maxes[0] <= 0:
            pieces, course = look()
        else:
            # New to one of the replicas: all of them meet.
            new = Occasion(_NEW_FORM, occasion.step)
            pieces, course = self._attempt(look, new)
            self._meeting.hold(new, Said(course.form))
            first.learn()
            self._agreed.add((number, is_training))
        return self._inputs(pieces, occasion.step, self._mean(heard.figures)), course

    def _offered(self, offer: Offer, course: Course) -> Said:
        """What rank 0 tells of a batch: its size, the number of its kind, and whether that is new."""
        is_new = float((offer.number, course.kind.is_training) not in self._agreed)
        figures = Figures(self._load_of(offer.cut, course), (is_new,))
        return Said(figures=figures, content=(float(offer.number),))

    def _settings(self, first: FirstInputs) -> Form:
        """All ranks must have met as many kinds of batches since their number of microbatches was set.

        Else they would not be sent what they wait for.
        """
        count = self._cutter.plan.num_microbatches
        return Form.of_options({"microbatches": f"{count}, with {first.num_known} kinds of batches met since"})

    def _load_of(self, pieces: CutBatch, course: Course) -> tuple[float, float]:
        """The samples of this pipeline, and whether there is a loss; said by one of its ranks."""
        has_target = course.kind.is_training or pieces.microbatches[0].target is not None
        has_loss = has_target if self._cutter.has_loss_fn else all(course.kind.roots)
        return float(sum(piece.size for piece in pieces.microbatches)), float(has_loss)

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

    def _mean(self, figures: Figures) -> float:
        """The samples, as a mean over the replicas, of which all or none must have a loss."""
        count, (samples, losses) = self._part.crew.num_replicas, figures.sums[:2]
        if losses not in (0.0, count):
            error = RunError(
                "some replicas were given what a loss needs and others were not",
                with_loss=int(losses),
                replicas=count,
                hint="a target, or labels, on every replica or on none",
            )
            error.is_shared = True
            raise error
        return samples / count

    def _inputs(self, pieces: CutBatch, step: int, mean_size: float) -> Inputs:
        return Inputs(*pieces, mix(self._options.seed, step, self._part.crew.replica), mean_size)
