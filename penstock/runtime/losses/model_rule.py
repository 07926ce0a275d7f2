"""Model rule: how the loss of a model that returns it is reduced, for every recording of the model."""

from dataclasses import replace

from penstock.capture import Captured, Microbatch, Recording
from penstock.errors import PenstockError
from penstock.ir import loss_rule
from penstock.runtime.losses.case import Case
from penstock.runtime.losses.counting import Tally, facts_of, without_numbers
from penstock.runtime.losses.coupling import couplings
from penstock.runtime.losses.loss_value import loss_name
from penstock.runtime.losses.reading import Reading
from penstock.runtime.losses.stand_in import try_model
from penstock.runtime.losses.verdict import UNSEEN, Verdict, verdict


class ModelRule:
    """Finds the rule of each recording once, by reading the recording and by a trial with noise for the blocks."""

    def __init__(self, captured: Captured, reduction: str | None) -> None:
        self._captured, self._reduction = captured, reduction
        self._names: dict[int, str] = {}
        self._verdicts: dict[int, Verdict] = {}
        self._first: Verdict | None = None

    @property
    def verdict(self) -> Verdict | None:
        """The first that was found."""
        return self._first

    def loss_name(self, recording: Recording) -> str:
        """The value that is the loss."""
        if id(recording) not in self._names:
            self._names[id(recording)] = loss_name(recording)
        return self._names[id(recording)]

    def of(self, recording: Recording, case: Case) -> Verdict:
        """What is known of a recording, which holds for the microbatch of the case."""
        if id(recording) not in self._verdicts:
            reading = read_model(self._captured, recording)
            trial = try_model(self._captured, recording, case) if self._reduction is None else None
            found = verdict(reading, trial, self._reduction)
            # No later trial would tell a mean over samples from one over labels.
            doubts = found.doubts or ((UNSEEN,) if found.is_ambiguous else ())
            self._verdicts[id(recording)] = replace(found, doubts=doubts)
            self._first = self._first or self._verdicts[id(recording)]
        return self._verdicts[id(recording)]


def read_model(captured: Captured, recording: Recording) -> Reading:
    """The rule of the loss in a recording, and a counter that looks at the inputs of microbatches."""
    counter = _ModelCounter(captured, recording)
    seen = couplings(captured.model, recording)
    hidden = couplings(captured.model, recording, is_tried=True)
    return Reading(counter.rule, counter, seen, hidden)


class _ModelCounter:
    """Counts by the recording that holds for each microbatch."""

    def __init__(self, captured: Captured, recording: Recording) -> None:
        self._captured, self._recording = captured, recording
        self._tallies: dict[int, tuple[Recording, Tally]] = {}
        self.rule = self._tally(recording).rule

    def __call__(self, microbatch: Microbatch, recording: Recording | None = None) -> tuple[float, ...] | None:
        if not any(term.counts for term in self.rule.terms):
            return tuple(float(microbatch.size) for _ in self.rule.terms)
        own = self._tally(recording or self._captured.recording(microbatch.args, microbatch.kwargs))
        inputs = self._captured.inputs(microbatch.args, microbatch.kwargs)
        if own.is_like(self.rule):
            return own(inputs, microbatch.size)
        try:
            # Such as where nothing counts, and the model therefore divides by something else.
            return self._tally(self._recording)(inputs, microbatch.size)
        except (PenstockError, RuntimeError, IndexError, KeyError):
            return None

    def _tally(self, recording: Recording) -> Tally:
        if id(recording) not in self._tallies:
            # The recording is kept, so that no other one gets its identity.
            facts = facts_of(recording, self._captured.model)
            rule = loss_rule(recording.record, recording.graph, loss_name(recording), facts)
            self._tallies[id(recording)] = recording, Tally(rule, without_numbers(recording), self._captured.model)
        return self._tallies[id(recording)][1]
