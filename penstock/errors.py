"""Every exception that penstock raises on purpose, and the category of its warnings."""

from collections.abc import Mapping
from typing import Any, Self


class PenstockWarning(UserWarning):
    """Category of every warning issued by penstock. Each is issued once per run, by one rank."""


class PenstockError(ValueError):
    """Base class of every error that penstock raises on purpose.

    `PenstockError("rank out of range", rank=7, ranks=4, hint="a rank below 4")` reads
    `rank out of range (rank: 7, ranks: 4)`, newline, `try: a rank below 4`.

    Args:
        problem: what is wrong, in one line
        hint: what to try
        report: further lines, shown between the two
        **values: the values that show the problem
    """

    is_shared = False
    """whether every rank raises the same error, so that all of them can continue"""
    repeats: bool | None = None
    """whether another rank raised it first, and this one repeats its error; None if no rank was first"""
    is_final = False
    """whether the error is a decision, so that a restart would only repeat it"""

    def __init__(self, problem: str, /, *, hint: str = "", report: object = "", **values: object) -> None:
        self.problem = problem
        self.hint = hint
        self.report = str(report)
        self.values = values
        shown = ", ".join(f"{name.replace('_', ' ')}: {value}" for name, value in values.items())
        lines = (f"{problem} ({shown})" if shown else problem, self.report, f"try: {hint}" if hint else "")
        super().__init__("\n".join(line for line in lines if line))

    def on_all_ranks(self) -> Self:
        """Mark the error as one that every rank raises; returns the error itself."""
        self.is_shared = True
        return self

    def with_hint(self, hint: str) -> Self:
        """A copy with another hint."""
        return self._copy(hint, self.values)

    def _copy(self, hint: str, values: Mapping[str, object]) -> Self:
        error = type(self)(self.problem, hint=hint, report=self.report, **values)
        # The attributes that are not arguments, such as `is_shared`.
        vars(error).update({name: value for name, value in vars(self).items() if name not in vars(error)})
        return error

    def to_dict(self) -> dict[str, object]:
        """The arguments of the error as JSON values, to be sent to the other ranks."""
        values = {name: str(value) for name, value in self.values.items()}
        return {"problem": self.problem, "hint": self.hint, "report": self.report, "values": values}

    @classmethod
    def from_dict(cls, arguments: Mapping[str, Any], /, **values: object) -> Self:
        """The error that `to_dict` of another rank described, which every rank raises; `values` are shown first."""
        values |= arguments["values"]
        return cls(arguments["problem"], hint=arguments["hint"], report=arguments["report"], **values).on_all_ranks()


class FormatError(PenstockError):
    """A text, CSV or JSON document that cannot be read or written."""


class GraphError(PenstockError):
    """A Graph or Profile that is inconsistent."""


class PartitionError(PenstockError):
    """A partition that cannot be made."""


class CodeError(PenstockError):
    """Stages that cannot be written as Python code."""


class CostError(PenstockError):
    """Costs, links or memory sizes that are invalid."""


class ScheduleError(PenstockError):
    """An order of actions that is incomplete, illegal or would deadlock."""


class PlanError(PenstockError):
    """Choices that do not fit together."""


class FitError(PlanError):
    """No candidate fits in memory."""


class ViewError(PenstockError):
    """A picture that cannot be drawn with the given options."""


class CaptureError(PenstockError):
    """A model that cannot be recorded, or a batch for which a record is not valid."""


class CheckpointError(PenstockError):
    """A checkpoint that cannot be read or written, or that belongs to another model."""


class DamagedError(CheckpointError):
    """A checkpoint whose files are truncated, swapped, missing or changed."""


class RunError(PenstockError):
    """A step that failed, with rank, step, stage, microbatch and action as far as they are known."""

    rank_message = ""
    """the message of the failed rank's own error, if that was a PenstockError"""
    rank_summary = ""
    """the error of the failed rank in one line, `Type: message`"""

    @property
    def rank_error_type(self) -> str:
        """The class name of the failed rank's error."""
        return self.rank_summary.partition(":")[0]

    def at(self, **where: object) -> Self:
        """A copy with more values about the location; values already present are kept."""
        return self._copy(self.hint, {**where, **self.values})


class NoLossError(RunError):
    """A model without a loss function that returned no loss."""
