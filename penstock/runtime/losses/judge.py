"""Judge: reads and tries a loss function, and gives its verdict."""

from collections.abc import Callable
from typing import Any

from penstock.runtime.losses.case import Case
from penstock.runtime.losses.reading import Reading, read_function
from penstock.runtime.losses.trial import Trial, try_function
from penstock.runtime.losses.verdict import Verdict, verdict

LossFn = Callable[[Any, Any], Any]


class Judge:
    """Looks at a loss function by calling it: twice to read it, three times to try it."""

    def __init__(self, loss_fn: LossFn, reduction: str | None) -> None:
        self._loss_fn, self._reduction = loss_fn, reduction
        self._num_trials = 0

    def read(self, case: Case) -> Reading:
        """What a recording of the function shows."""
        return read_function(self._loss_fn, case.output, case.piece.target, case.piece.size)

    def judge(self, reading: Reading, case: Case) -> Verdict:
        """The verdict on what was read."""
        found = verdict(reading, self._tried(case), self._reduction)
        if found.is_ambiguous and case.partner.has_other_labels:
            return verdict(reading, self._tried(case, as_pair=True), self._reduction)
        return found

    def confirms(self, found: Verdict, case: Case) -> bool | None:
        """Whether another trial gives the same verdict; None if it tells nothing.

        A mean over samples is told from one over labels by two samples with different numbers of labels.
        """
        if found.is_ambiguous and not case.partner.has_other_labels:
            return None
        trial = self._tried(case, as_pair=found.is_ambiguous)
        if trial is None or trial.evidence is None:
            return None
        again = verdict(Reading(found.rule, found.counter, found.doubts, found.doubts), trial)
        return (again.rule, again.doubts) == (found.rule, found.doubts)

    def _tried(self, case: Case, as_pair: bool = False) -> Trial | None:
        """A rule that the user gave is not tried."""
        if self._reduction is not None:
            return None
        self._num_trials += 1
        return try_function(self._loss_fn, case, self._num_trials - 1, as_pair)
