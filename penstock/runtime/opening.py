"""Opening: the beginning of a step, at which its batch is looked at and all ranks agree on what they are about to do.

Where every rank has the batch, they show each other the form of it that they see, and the first messages wait for the
answer. Where only rank 0 has it, the ranks meet first, then take their parts; a kind of batch that is new is agreed on.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from penstock.errors import PenstockError, RunError
from penstock.runtime.batch_cutter import BatchCutter
from penstock.runtime.checksum import checksum
from penstock.runtime.course import Course
from penstock.runtime.first_inputs import FirstInputs, Offer
from penstock.runtime.model_part import ModelPart
from penstock.runtime.options import RunOptions
from penstock.runtime.seeds import mix
from penstock.runtime.step_data import CutBatch, Inputs, StepData
from penstock.runtime.sync import Agreement, RankSync, SyncRequest, SyncResult, SyncVote
from penstock.runtime.transports import Transport

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
        sync: RankSync,
        cutter: BatchCutter,
        gate: Transport | None,
        course_of: CourseOf,
        options: RunOptions,
    ) -> None:
        self._part, self._sync, self._cutter, self._gate = part, sync, cutter, gate
        self._course_of, self._options = course_of, options
        self._first = FirstInputs(part, cutter) if cutter.is_handed_out else None
        self._agreed: set[tuple[int, bool]] = set()

    def lacks_target(self, data: StepData) -> bool:
        """Whether there is a loss function, and nothing for it to compare with."""
        return self._cutter.has_loss_fn and data.inputs.microbatches[0].target is None

    def begin(self, batch: Batch, request: SyncRequest, is_training: bool, keeps_outputs: bool) -> Begun:
        """What a step works on and the way to run it; raises on every rank alike if one of them cannot take it."""
        if self._first is None:
            inputs, course = self._given(batch, request, is_training)
        else:
            inputs, course = self._handed_out(self._first, batch, request, is_training)
        return StepData(inputs, is_training, keeps_outputs), course

    def _given(self, batch: Batch, request: SyncRequest, is_training: bool) -> tuple[Inputs, Course]:
        def look() -> tuple[CutBatch, Course, int]:
            pieces = self._cutter.cut(self._cutter.placed(batch))
            every = self._options.check_inputs_every
            looks = every and request.step % every == 0 and not self._part.groups.is_local
            return pieces, self._course_of(pieces, is_training), checksum(self._cutter.content(pieces)) if looks else 0

        pieces, course, content = self._attempt(look, request)
        size, has_loss = self._load_of(pieces, course)
        says = self._part.groups.rank == 0
        self._sync.start(request, SyncVote(course.form, content, (size, has_loss) if says else (0.0, 0.0)))
        if self._gate is not None:
            self._gate.check_before_sending(self._sync.finish)
        else:
            size = self._mean(self._sync.finish())
        return self._inputs(pieces, request.step, size), course

    def _handed_out(
        self, first: FirstInputs, batch: Batch, request: SyncRequest, is_training: bool
    ) -> tuple[Inputs, Course]:
        offer, said = None, SyncVote(sums=(0.0, 0.0), maxes=(0.0,))
        if self._part.groups.rank == 0:

            def offered() -> tuple[Offer, SyncVote]:
                found = first.offer(self._cutter.placed(batch))
                return found, self._offered(found, self._course_of(found.cut, is_training))

            offer, said = self._attempt(offered, request)
        heard = self._sync.exchange(request, said._replace(agreement=self._settings(first)))
        number = int(heard.content(0)[0])

        def look() -> tuple[CutBatch, Course]:
            pieces = first.take(number) if offer is None else first.give(offer)
            return pieces, self._course_of(pieces, is_training)

        if heard.maxes[0] <= 0:
            pieces, course = look()
        else:
            # New to one of the replicas: all of them meet.
            new = SyncRequest(_NEW_FORM, request.step)
            pieces, course = self._attempt(look, new)
            self._sync.exchange(new, SyncVote(course.form))
            first.learn()
            self._agreed.add((number, is_training))
        return self._inputs(pieces, request.step, self._mean(heard)), course

    def _offered(self, offer: Offer, course: Course) -> SyncVote:
        """What rank 0 tells of a batch: its size, the number of its kind, and whether that is new."""
        is_new = float((offer.number, course.kind.is_training) not in self._agreed)
        return SyncVote(sums=self._load_of(offer.cut, course), maxes=(is_new,), content=(float(offer.number),))

    def _settings(self, first: FirstInputs) -> Agreement:
        """All ranks must have met as many kinds of batches since their number of microbatches was set.

        Else they would not be sent what they wait for.
        """
        count = self._cutter.plan.num_microbatches
        return Agreement.of_options({"microbatches": f"{count}, with {first.num_known} kinds of batches met since"})

    def _load_of(self, pieces: CutBatch, course: Course) -> tuple[float, float]:
        """The samples of this pipeline, and whether there is a loss; said by one of its ranks."""
        has_target = course.kind.is_training or pieces.microbatches[0].target is not None
        has_loss = has_target if self._cutter.has_loss_fn else all(course.kind.roots)
        return float(sum(piece.size for piece in pieces.microbatches)), float(has_loss)

    def _attempt(self, look: Callable[[], Found], request: SyncRequest) -> Found:
        """Look at a batch; what this rank cannot take, all others hear of."""
        try:
            return look()
        except Exception as error:
            told = error if isinstance(error, PenstockError) else RunError(f"{type(error).__name__}: {error}")
            self._sync.refuse(request, told)
            if isinstance(told, RunError) and not self._part.groups.is_local:
                told = told.at(rank=self._part.groups.rank)
            told.is_shared = True
            raise told from (error.__cause__ if isinstance(error, PenstockError) else error)

    def _mean(self, figures: SyncResult) -> float:
        """The samples, as a mean over the replicas, of which all or none must have a loss."""
        count, (samples, losses) = self._part.groups.num_replicas, figures.sums[:2]
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
        return Inputs(*pieces, mix(self._options.seed, step, self._part.groups.replica), mean_size)
