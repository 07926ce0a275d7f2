"""The input of a report: a plan, its predicted step, and the run that followed it."""

from dataclasses import dataclass

from penstock.errors import ViewError
from penstock.ir import Plan, Run, Trace


@dataclass(frozen=True)
class Advice:
    """One change of a plan, and the step time that is predicted with it."""

    change: str
    """the change, as a command or in words"""
    seconds: float
    """predicted for a step of the same batch"""
    gain: float
    """share of the predicted step time that is saved"""
    note: str = ""
    """the assumption behind the figure, or the cost of the change"""


@dataclass(frozen=True)
class Contents:
    """Everything that a report shows."""

    plan: Plan
    predicted: Trace
    run: Run | None = None
    advice: tuple[Advice, ...] = ()
    digest: str = ""
    """of the plan, in hexadecimal digits"""
    versions: tuple[tuple[str, str], ...] = ()
    """of the software that made the report, by name"""
    stream: Trace | None = None
    """the predicted trace of several batches without a flush between them, if it was asked for"""
    staleness: tuple[tuple[str, ...], ...] = ()
    """a table about the stages without flushes: the names of its columns, then a row per stage"""

    def __post_init__(self) -> None:
        if self.predicted.num_ranks != self.plan.num_ranks:
            ranks, planned = self.predicted.num_ranks, self.plan.num_ranks
            raise ViewError("the trace must have the ranks of the plan", ranks=ranks, planned=planned)
        if self.run is not None and self.run.plan != self.plan:
            raise ViewError("the run followed another plan", hint="the plan of the run")

    @property
    def traces(self) -> dict[str, Trace]:
        """The timelines to show, by name."""
        recorded = self.run.trace if self.run else None
        stream = {"predicted without flushes": self.stream} if self.stream else {}
        return {"predicted": self.predicted} | ({"measured": recorded} if recorded else {}) | stream
