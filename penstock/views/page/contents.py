"""Contents: all that a report shows, gathered before it is drawn."""

from dataclasses import dataclass

from penstock.errors import ViewError
from penstock.ir import Plan, Run, Trace


@dataclass(frozen=True)
class Advice:
    """One change of a plan, what a step would take with it, and the share of the time that this saves."""

    change: str
    """what to do, as a command or in words"""
    seconds: float
    """predicted, of a step of the same batch"""
    gain: float
    """share of the predicted step that is saved"""
    note: str = ""
    """what it rests on, or what it costs"""


@dataclass(frozen=True)
class Contents:
    """A plan, the step that it predicts and, where it was trained by, the run; and what could be better."""

    plan: Plan
    predicted: Trace
    run: Run | None = None
    advice: tuple[Advice, ...] = ()
    digest: str = ""
    """of the plan, in hexadecimal digits"""
    versions: tuple[tuple[str, str], ...] = ()
    """of what the report was made with, by name"""

    def __post_init__(self) -> None:
        if self.predicted.num_ranks != self.plan.num_ranks:
            ranks = self.predicted.num_ranks
            raise ViewError("the trace has other ranks than the plan", ranks=ranks, planned=self.plan.num_ranks)
        if self.run is not None and self.run.plan != self.plan:
            raise ViewError("the run followed another plan", hint="the plan of the run")

    @property
    def traces(self) -> dict[str, Trace]:
        """The timelines to show, by name."""
        recorded = self.run.trace if self.run else None
        return {"predicted": self.predicted} | ({"measured": recorded} if recorded else {})
