"""Closing: after the last action every rank learns the losses, and whether all numbers are numbers."""

import math
import warnings
from collections.abc import Callable, Sequence

import torch

from penstock.errors import RunError
from penstock.ir import Plan, Trace
from penstock.runtime.blame import agreed
from penstock.runtime.course import Course
from penstock.runtime.health import is_stage, last_broken
from penstock.runtime.loss_head import LossHead
from penstock.runtime.model_part import ModelPart
from penstock.runtime.options import RunOptions
from penstock.runtime.outputs import Outputs
from penstock.runtime.recorded import trace_of
from penstock.runtime.remarks import Remarks
from penstock.runtime.result import Result
from penstock.runtime.step_data import StepData
from penstock.runtime.sync import MAX_CONTENT, RankSync, SyncRequest, SyncResult, SyncVote
from penstock.runtime.times import Times, gathered
from penstock.runtime.witness import Witness

_LEFT = {True: ", gradients, weights and buffers are as before it", False: ", and with it all gradients"}
"""what becomes of a step without numbers, by whether the gradients before it are kept"""
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Closing:
    """Gathers what the ranks know into one Result."""

    def __init__(self, part: ModelPart, sync: RankSync, ending: LossHead, options: RunOptions, plan: Plan) -> None:
        self._part, self._sync = part, sync
        self._ending, self._options, self._plan = ending, options, plan
        self._remarks = Remarks()
        self._last = plan.schedule.placement[plan.num_stages - 1]
        self._outputs = Outputs(part.groups, self._last, part.device)

    def bring(
        self,
        data: StepData,
        course: Course,
        times: Sequence[Times] | None,
        step: int,
        look_again: Callable[[], Witness] | None,
    ) -> Result:
        """The result of a step, the same on every rank; one that trains and broke is looked at again."""
        known = self._known(data)
        figures = self._figures(data, known)
        inline = known if len(known) <= MAX_CONTENT else ()
        request = SyncRequest("the end of step" if data.is_training else "the end of eval", step)
        heard = self._sync.exchange(request, SyncVote(sums=figures[0], maxes=figures[1], content=inline))
        self._remarks.say(data, self._ending, lambda: self._part.parameters)
        total, (has_loss, place, _, _) = heard.sums, heard.maxes
        losses, weights = self._told(heard, known, data) if has_loss > 0 else ((), ())
        dtype = _DTYPES[int(place)] if has_loss > 0 else torch.float64
        mean = (total[0] + total[1]) / self._part.groups.num_replicas
        return Result(
            torch.tensor(mean, dtype=torch.float64).to(dtype) if has_loss > 0 else None,
            tuple(torch.tensor(losses, dtype=torch.float64).to(dtype).unbind()),
            tuple(weights),
            self._merged(data),
            self._trace(course, times),
            self._broken(heard, step, look_again) if look_again else "",
        )

    def _known(self, data: StepData) -> tuple[float, ...]:
        """On the rank of the last stage the losses of the microbatches and their weights; nothing on others."""
        if not data.losses:
            return ()
        found = torch.stack([data.losses[index] for index in range(len(data.losses))]).tolist()
        return (*found, *self._ending.weights(data))

    def _told(
        self, heard: SyncResult, known: tuple[float, ...], data: StepData
    ) -> tuple[Sequence[float], Sequence[float]]:
        """The losses and weights of all microbatches, on every rank."""
        count, groups = len(data.inputs.microbatches), self._part.groups
        found = list(known if groups.is_local else heard.content(self._last))
        if not found:
            numbers = torch.tensor(known or [0.0] * 2 * count, dtype=torch.float64)
            found = groups.broadcast(numbers, self._last).tolist()
        return found[:count], found[count:]

    def _figures(self, data: StepData, known: Sequence[float]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Sums: the loss, and what was added. Largest: is there a loss, its type, the first and the last broken stage.

        The first one is given as a negative number, so that the largest is the first.
        """
        loss, has_loss, dtype = 0.0, 0.0, -1.0
        added = sum(float(value) for values in data.added.values() for value in values)
        if data.losses:
            has_loss, dtype = 1.0, float(_DTYPES.index(next(iter(data.losses.values())).dtype))
            weights = known[len(data.losses) :]
            loss = sum(weights[microbatch] * known[microbatch] for microbatch in data.losses if weights[microbatch])
        first, last = self._broken_stages(data)
        return (loss, added), (has_loss, dtype, -first, last)

    def _broken_stages(self, data: StepData) -> tuple[float, float]:
        if not (data.is_training and self._looks):
            return math.inf, -math.inf
        stages = {index: stage.parameters() for index, stage in self._part.stages.items()}
        return float(data.health.first_broken()), float(last_broken(stages))

    @property
    def _looks(self) -> bool:
        return self._options.nonfinite != "ignore" and not self._ending.is_scaled

    def _broken(self, figures: SyncResult, step: int, look_again: Callable[[], Witness]) -> str:
        """Refuse a step that brought numbers that are none, or say what was wrong."""
        first, last = -figures.maxes[2], figures.maxes[3]
        if not is_stage(first) and not is_stage(last):
            return ""
        is_forward = is_stage(first)
        stage = int(first) if is_forward else int(last)
        blame = agreed(self._part.groups, look_again().own(stage if is_forward else None))
        nodes = self._plan.partition.stages[stage]
        error = RunError(
            f"a loss or gradient is not a finite number; this step was dropped{_LEFT[self._options.restore_gradients]}",
            step=step,
            stage=blame.stage if blame else stage,
            during="forward" if is_forward else "backward",
            **(blame.values if blame else {"nodes": f"{nodes[0]} to {nodes[-1]}"}),
            hint='a smaller learning rate, clip_grad_norm_, or nonfinite="skip" to go on without this batch',
        )
        if self._options.nonfinite == "raise":
            error.is_shared = True
            raise error
        warnings.warn(str(error), RuntimeWarning, stacklevel=5)
        return str(error)

    def _merged(self, data: StepData) -> object:
        if not data.keeps_outputs:
            return None
        weights = self._ending.weights(data) if data.losses else None
        return self._outputs.shared(
            [data.outputs.get(index) for index in range(len(data.inputs.microbatches))], data.inputs.sizes, weights
        )

    def _trace(self, course: Course, times: Sequence[Times] | None) -> Trace | None:
        if times is None:
            return None
        lengths = [len(course.program.table.rank(rank)) for rank in range(self._plan.num_ranks)]
        return trace_of(course.program, self._plan.costs, *gathered(self._part.groups, times, lengths))
