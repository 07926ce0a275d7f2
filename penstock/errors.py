"""Every exception that penstock raises on purpose, one class per station of the way from model to trace."""


class PenstockWarning(UserWarning):
    """Category of every warning issued by penstock. Each is issued once per run, by one rank."""


class PenstockError(ValueError):
    """What is wrong in the user's words, the values that show it, and what to try.

    `PenstockError("rank out of range", rank=7, ranks=4, hint="a rank below 4")` reads
    `rank out of range (rank: 7, ranks: 4)`, newline, `try: a rank below 4`. Where one line cannot tell it, a `report`
    stands between the two.
    """

    is_shared = False
    """whether every rank raises it alike, so that all of them can go on"""
    is_final = False
    """whether it was decided on, so that another attempt makes no sense"""

    def __init__(self, problem: str, /, *, hint: str = "", report: object = "", **values: object) -> None:
        self.problem = problem
        self.hint = hint
        self.report = str(report)
        self.values = values
        shown = ", ".join(f"{name.replace('_', ' ')}: {value}" for name, value in values.items())
        lines = (f"{problem} ({shown})" if shown else problem, self.report, f"try: {hint}" if hint else "")
        super().__init__("\n".join(line for line in lines if line))

    def plain(self) -> dict[str, object]:
        """What it says as values that JSON can hold, to be told to other processes."""
        values = {name: str(value) for name, value in self.values.items()}
        return {"problem": self.problem, "hint": self.hint, "report": self.report, "values": values}


class FormatError(PenstockError):
    """A text, CSV or JSON document that does not say a noun."""


class GraphError(PenstockError):
    """A Graph or Profile that contradicts itself."""


class PartitionError(PenstockError):
    """A cut of the model that cannot be made."""


class CodeError(PenstockError):
    """Stages that cannot be written as Python code."""


class CostError(PenstockError):
    """Costs, links or memory figures that make no sense."""


class ScheduleError(PenstockError):
    """An order of actions that is incomplete, unlawful or would deadlock."""


class PlanError(PenstockError):
    """Choices that do not fit together."""


class FitError(PlanError):
    """Nothing that was asked for fits in memory."""


class ViewError(PenstockError):
    """A picture that cannot be drawn as asked."""


class CaptureError(PenstockError):
    """A model that cannot be recorded as calls on values, or a batch for which a record does not hold."""


class CheckpointError(PenstockError):
    """Files that do not hold a model's numbers, or not those of this model."""


class DamagedError(CheckpointError):
    """Files of a checkpoint that are not what was written: cut off, exchanged, missing or changed."""


class RunError(PenstockError):
    """A step that failed, and where: rank, step, stage, microbatch and action as far as they are known."""

    words_of_rank = ""
    """what the rank that broke said itself, if it was an error of this family"""
    summary_of_rank = ""
    """the error of the rank that broke in one line"""

    @property
    def kind_of_rank(self) -> str:
        """The class of that error, by its name."""
        return self.summary_of_rank.partition(":")[0]

    def at(self, **where: object) -> "RunError":
        """The same error with more about where it happened; what it already says stays."""
        return self._again(self.hint, {**where, **self.values})

    def advised(self, hint: str) -> "RunError":
        """The same error with what to try."""
        return self._again(hint, self.values)

    def _again(self, hint: str, values: dict[str, object]) -> "RunError":
        error = type(self)(self.problem, hint=hint, report=self.report, **values)
        error.is_shared = self.is_shared
        return error
