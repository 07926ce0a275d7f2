"""The state of a run besides the tensors of model and optimizer: the document `run.json` of a checkpoint.

To add a field: declare it in `RunState`, write it in `encode` and read it in `decode`. `Pipeline.save` gives its value.
If it is restored into an object, add a restorer here, which `loading.py` calls; if callers of `load` need it, a field
of `Loaded` (`reader.py`). Older versions ignore a field that they do not know, and older checkpoints do not have it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.checkpoint.manifest import MAX_STEP
from penstock.errors import DamagedError, RunError
from penstock.ir import as_int
from penstock.runtime import GradScaler, NamedTensors, encode_tree

RUN = "run"
"""the name of the document, without suffix"""


class FitProgress(NamedTuple):
    """The numbers of steps when `fit` took its last step. A step of `fit` may take several of the Pipeline."""

    steps: int = 0
    """of `fit`"""
    pipeline_steps: int = 0
    """of the Pipeline: `num_steps`"""


@dataclass(frozen=True)
class RunState:
    """The fields of the document. Those of the first rank are saved."""

    num_steps: int
    """number of steps that the Pipeline has taken"""
    position: Any = None
    """the position in the data, as given to `save`"""
    extra: Any = None
    """the `extra` given to `save`"""
    scaler: Any = None
    """the state of the scaler; None if there is none"""
    fit_progress: FitProgress = field(default=FitProgress())

    def encode(self, tensors: NamedTensors) -> dict[str, Any]:
        """The document as JSON values; its tensors are added to `tensors`."""
        fields = {} if self.scaler is None else {"scaler": self.scaler}
        fields |= {"position": self.position, "extra": self.extra, "num_steps": self.num_steps}
        fields |= {"fit_progress": list(self.fit_progress)} if any(self.fit_progress) else {}
        return {name: encode_tree(value, tensors, name) for name, value in fields.items()}

    @classmethod
    def decode(cls, document: Any, step: int) -> "RunState":
        """Read the document of the checkpoint of step `step`; raises a DamagedError if it is invalid."""
        if not isinstance(document, dict):
            raise DamagedError("a document is not a JSON object", file=RUN)
        num_steps = as_int(document.get("num_steps"))
        if num_steps is not None and not 0 <= num_steps <= MAX_STEP:
            raise DamagedError("invalid number of steps in a document", num_steps=str(num_steps)[:60])
        num_steps = step if num_steps is None else num_steps  # without it each step was one of the Pipeline
        fit_steps, pipeline_steps = map(as_int, document.get("fit_progress", (0, 0)))
        if not all(number is not None and 0 <= number <= MAX_STEP for number in (fit_steps, pipeline_steps)):
            raise DamagedError("invalid steps of fit in a document", fit_progress=repr(document["fit_progress"])[:60])
        if "scaler" in document and document["scaler"] is None:
            raise DamagedError("the state of the scaler cannot be read", reason="it is null")
        position, extra, scaler = (document.get(name) for name in ("position", "extra", "scaler"))
        return cls(num_steps, position, extra, scaler, FitProgress(fit_steps, pipeline_steps))

    def scaler_restorer(self, scaler: GradScaler) -> Callable[[], None]:
        """Check the state of the scaler; returns a function that restores it, a no-op if there is no state."""
        if self.scaler is None:
            return lambda: None
        try:
            GradScaler().load_state_dict(self.scaler)  # on another one, so that nothing changes yet
        except RunError as error:
            raise DamagedError("the state of the scaler cannot be read", reason=error.problem) from None
        return lambda: scaler.load_state_dict(self.scaler)
