"""Homecoming: after the last action every rank learns the losses, and whether all numbers are numbers."""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.errors import RunError
from penstock.ir.plan import Plan
from penstock.ir.trace import Trace
from penstock.runtime.health import is_stage, last_broken
from penstock.runtime.outputs import Outputs
from penstock.runtime.times import Times, gathered
from penstock.training.course import Course
from penstock.training.ending import Ending
from penstock.training.holdings import Holdings
from penstock.training.load import Load
from penstock.training.options import RunOptions
from penstock.training.recorded import trace_of
from penstock.training.remarks import Remarks
from penstock.training.result import Result

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_HEAD = 6
"""figures before those of the microbatches: is there a loss, its type, that of the batch, what was added, and the first
and the last broken stage"""


class Homecoming:
    """Gathers what the ranks know into one Result."""

    def __init__(self, holdings: Holdings, ending: Ending, options: RunOptions, plan: Plan) -> None:
        self._crew, self._holdings = holdings.crew, holdings
        self._ending, self._options, self._plan = ending, options, plan
        self._remarks = Remarks()
        self._outputs = Outputs(self._crew, plan.schedule.placement[plan.num_stages - 1])

    def bring(self, load: Load, course: Course, times: Sequence[Times] | None, step: int) -> Result:
        """The result of a step, the same on every rank."""
        rows = self._crew.gather(self._figures(load))
        # The other replicas may have other numbers of microbatches.
        figures, heads = rows.sum(0), self._crew.gather_replicas(rows[:, :_HEAD])
        if load.is_training and load.losses:
            self._remarks.say(load, self._ending)
        dtype = _DTYPES[int(figures[1])]
        count, has_loss = len(load.inputs.microbatches), bool(figures[0])
        losses, weights = figures[_HEAD : _HEAD + count].to(dtype), figures[_HEAD + count :]
        return Result(
            (heads[:, 2:4].sum() / self._crew.num_replicas).to(dtype) if has_loss else None,
            tuple(losses.unbind()) if has_loss else (),
            tuple(weights.tolist()) if has_loss else (),
            self._merged(load),
            self._trace(course, times),
            self._broken(heads, step) if load.is_training else "",
        )

    def _figures(self, load: Load) -> Tensor:
        count = len(load.inputs.microbatches)
        head, losses, weights = [0.0] * _HEAD, [0.0] * count, [0.0] * count
        for microbatch, added in load.added.items():
            head[3] += load.inputs.share(microbatch) * sum(float(value) for value in added)
        if load.losses:
            head[0], head[1] = 1.0, _DTYPES.index(next(iter(load.losses.values())).dtype)
            weights = list(self._ending.weights(load))
            found = torch.stack(list(load.losses.values())).tolist()
            for microbatch, loss in zip(load.losses, found, strict=True):
                losses[microbatch] = loss
                if weights[microbatch]:
                    head[2] += weights[microbatch] * loss
        if load.is_training and self._looks:
            head[4] = load.health.first_broken()
            head[5] = last_broken({index: stage.parameters() for index, stage in self._holdings.stages.items()})
        return torch.tensor([*head, *losses, *weights], dtype=torch.float64)

    @property
    def _looks(self) -> bool:
        return self._options.nonfinite != "ignore" and not self._ending.is_scaled

    def _broken(self, heads: Tensor, step: int) -> str:
        """Drop the gradients of a step that brought numbers that are none; says what was wrong."""
        if not self._looks:
            return ""
        first, last = float(heads[:, 4].min()), float(heads[:, 5].max())
        if not is_stage(first) and not is_stage(last):
            return ""
        stage = int(first) if is_stage(first) else int(last)
        nodes = self._plan.partition.stages[stage]
        self._holdings.drop()
        error = RunError(
            "a loss or gradient is not a finite number; gradients were dropped and weights are as they were",
            step=step,
            stage=stage,
            during="forward" if is_stage(first) else "backward",
            nodes=f"{nodes[0]} to {nodes[-1]}",
            hint='a smaller learning rate, clip_grad_norm_, or nonfinite="skip" to go on without this batch',
        )
        if self._options.nonfinite == "raise":
            raise error
        warnings.warn(str(error), RuntimeWarning, stacklevel=5)
        return str(error)

    def _merged(self, load: Load) -> object:
        if not load.keeps_outputs:
            return None
        weights = self._ending.weights(load) if load.losses else None
        return self._outputs.shared(
            [load.outputs.get(index) for index in range(len(load.inputs.microbatches))], load.inputs.sizes, weights
        )

    def _trace(self, course: Course, times: Sequence[Times] | None) -> Trace | None:
        if times is None:
            return None
        lengths = [len(course.program.table.rank(rank)) for rank in range(self._plan.num_ranks)]
        return trace_of(course.program, self._plan.costs, *gathered(self._crew, times, lengths))
