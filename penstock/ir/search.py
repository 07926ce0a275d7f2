"""Search: the plans that were looked at, what each would take, and why one of them was chosen."""

from dataclasses import dataclass

from penstock.errors import PlanError
from penstock.ir.prediction import Prediction
from penstock.ir.units import aligned, bytes_text, percent_text, seconds_text

_COLUMNS = ("step", "bubble", "peak", "messages", "stages", "microbatches", "recomputed", "schedule", "cuts", "why not")


@dataclass(frozen=True)
class Choices:
    """The words that led to a plan, as the user types them, and which stages recompute their activations."""

    partitioner: str
    schedule: str
    recompute: tuple[bool, ...]
    placement: str = "given"
    """how the stages lie on the ranks: "loop", "vee", or "given" for any other way"""


@dataclass(frozen=True)
class Candidate:
    """One plan that was looked at, and why it lost; the chosen one lost to none."""

    choices: Choices
    num_microbatches: int
    num_messages: int
    predicted: Prediction
    lost: str = ""

    @property
    def row(self) -> tuple[str, ...]:
        """Its figures, as a line of the table."""
        seen, chosen = self.predicted, self.choices
        return (
            seconds_text(seen.makespan),
            percent_text(seen.bubble),
            bytes_text(max(seen.peaks)),
            str(self.num_messages),
            f"{len(chosen.recompute)} {chosen.placement}",
            str(self.num_microbatches),
            str(sum(chosen.recompute)),
            chosen.schedule,
            chosen.partitioner,
            self.lost or "chosen",
        )


@dataclass(frozen=True)
class Search:
    """The candidates from the best to the worst, and the reasons for the best, a sentence each."""

    candidates: tuple[Candidate, ...] = ()
    reasons: tuple[str, ...] = ()
    asked: tuple[tuple[str, str], ...] = ()
    """the wishes that the search was given, by name"""

    def __post_init__(self) -> None:
        for place, candidate in enumerate(self.candidates):
            if bool(candidate.lost) != bool(place):
                raise PlanError("the first candidate is the one that did not lose", place=place, lost=candidate.lost)

    def __str__(self) -> str:
        return (
            "\n".join(aligned([_COLUMNS, *(candidate.row for candidate in self.candidates)])) if self.candidates else ""
        )


UNSEARCHED = Search()
"""of a plan whose choices were all given"""
