"""Planning: by what plan a training goes, when it begins, when it goes on, and when ranks are gone."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.lasting import SavedPlan, plan_of, too_few
from penstock.cli.plan import Machine, Wishes, planned
from penstock.cli.running import planned_together
from penstock.cli.screen import note
from penstock.cli.training_job import Job
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.ir import Plan


class Planning:
    """By what plan a training goes: the one that is given, the one by which it was saved, or one that is found."""

    def __init__(self, job: Job, file: Path | None) -> None:
        self._job, self._wishes, self._file = job, job.wishes, file

    def first(self) -> "Plan":
        """The plan to begin with."""
        if self._file is not None:
            return self._checked(self._given)
        saved = self._saved
        if saved is None:
            return self._found(self._wishes)
        # Other plans have the same numbers but for rounding; by the same one they are the same to the last bit.
        if self._is_wanted(saved) and saved.plan.num_ranks == self._wishes.ranks:
            note(f"by the plan of the checkpoint: {saved.plan.choices.schedule} on {saved.plan.num_ranks} ranks")
            return saved.plan
        return self._found(self._cut_like(saved.plan))

    def for_fewer(self, plan: "Plan", ranks: int) -> "Plan":
        """A plan for fewer ranks, with batches cut as before."""
        return self._found(replace(self._cut_like(plan), ranks=ranks))

    def together(self, ranks: int) -> "Plan":
        """The plan for so many ranks that run, the same on all of them."""
        fewest = self._job.lasting.min_ranks
        if fewest is not None and ranks < fewest:
            raise PenstockError("too few ranks are left", ranks=ranks, min_ranks=fewest)
        if self._file is not None and (self._given.num_ranks == ranks or fewest is None):
            return self._given  # one for other ranks is refused where the pipeline is made
        saved = self._saved
        if saved is not None and self._is_wanted(saved) and saved.plan.num_ranks == ranks:
            return saved.plan
        known = self._given if self._file is not None else saved.plan if saved is not None else None
        wishes = self._wishes if known is None else self._cut_like(known)
        return planned_together(self._job.model, replace(wishes, ranks=ranks), self._job.example)

    @property
    def _given(self) -> "Plan":
        from penstock.ir import Plan

        assert self._file is not None
        return Plan.load(self._file)

    def _checked(self, plan: "Plan") -> "Plan":
        fewest = self._job.lasting.min_ranks
        if fewest is not None and fewest > plan.num_ranks:
            raise too_few(plan.num_ranks, fewest)
        return plan

    @property
    def _saved(self) -> "SavedPlan | None":
        lasting = self._job.lasting
        return plan_of(lasting.source(self._job.life)) if lasting.checkpoint is not None else None

    def _is_wanted(self, saved: SavedPlan) -> bool:
        """Whether a plan was made for the wishes that there are now; nothing but ranks is wished for any plan."""
        return self._file is None and (
            saved.wishes == asdict(self._wishes) or self._wishes == Wishes(self._wishes.ranks)
        )

    def _cut_like(self, plan: "Plan") -> Wishes:
        """The wishes, with batches cut as before unless something else is wished."""
        wishes = Wishes() if self._file is not None else self._wishes
        is_open = wishes.microbatches == Wishes.microbatches
        return replace(wishes, microbatches=str(plan.num_microbatches)) if is_open else wishes

    def _found(self, wishes: Wishes) -> "Plan":
        return planned(self._job.model, wishes, Machine.here(wishes.ranks), self._job.example)
