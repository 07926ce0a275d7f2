"""TrainingSchedule: the schedule of a pipeline that is there to be run, step by step."""

from typing import Any

from torch import Tensor

from penstock.api.pipeline import Pipeline
from penstock.auto.call import Call
from penstock.errors import RunError
from penstock.ir import Schedule
from penstock.runtime import Result


class TrainingSchedule:
    """Runs a Pipeline as schedules of torch.distributed.pipelining are run, but with the same call on every rank."""

    def __init__(self, name: str, pipeline: Pipeline, call: Call) -> None:
        self.name = name
        """what it is called, or the file that it comes from"""
        self.pipeline = pipeline
        self._call = call

    @property
    def order(self) -> Schedule:
        """Which rank does what in which order."""
        return self.pipeline.plan.schedule

    @property
    def n_microbatches(self) -> int:
        """Into how many microbatches a batch is cut."""
        return self.order.num_microbatches

    def step(self, *args: Any, target: Any = None, losses: list[Tensor] | None = None, **kwargs: Any) -> Result:
        """Forward and backward of one batch; `losses` then holds the loss of every microbatch, on every rank.

        Gradients add to those there: the sum over the microbatches, or their mean with `scale_grads_in_schedule`.
        """
        _check(losses)
        found = self.pipeline.step(*args, target=target, **self._call.kwargs(kwargs))
        return self._told(found, losses)

    def eval(self, *args: Any, target: Any = None, losses: list[Tensor] | None = None, **kwargs: Any) -> Result:
        """Forward of one batch in eval mode, without gradients; `return_outputs=True` brings the outputs."""
        _check(losses)
        found = self.pipeline.eval(*args, target=target, **self._call.kwargs(kwargs))
        return self._told(found, losses)

    def _told(self, found: Result, losses: list[Tensor] | None) -> Result:
        if losses is not None:
            losses[:] = found.losses
        return self._call.result(found)


def _check(losses: object) -> None:
    if losses is not None and not isinstance(losses, list):
        raise RunError("losses is a list to be filled", given=type(losses).__name__, hint="losses=[]")
