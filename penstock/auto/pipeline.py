"""AutoPipeline: a model built into a pipeline as a configuration says, and looked at and trained from there."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from penstock.api.pipeline import Pipeline
from penstock.auto.call import Call, LossFn
from penstock.auto.config import AutoPipelineConfig
from penstock.auto.example import example_of
from penstock.auto.info import PipelineInfo
from penstock.auto.mesh import pipeline_mesh
from penstock.auto.mistakes import check_build
from penstock.auto.parallelize import ParallelizeFnProtocol, parallelize
from penstock.auto.picture import draw
from penstock.auto.planning import plan_of
from penstock.auto.stages import schedule_name
from penstock.auto.summary import module_names, num_parameters, pipeline_text, stages_text
from penstock.auto.training_schedule import TrainingSchedule
from penstock.errors import PlanError, RunError
from penstock.ir import Plan, is_finite
from penstock.runtime import Result

_LOG = logging.getLogger(__name__)


class AutoPipeline:
    """`AutoPipeline(config).build(model, loss_fn=...)` is this rank's part of a pipeline; `step` trains it."""

    def __init__(self, config: AutoPipelineConfig) -> None:
        self.config = _checked(config)
        self.info = PipelineInfo()
        """what was built; its `schedule` trains as well"""

    def build(
        self,
        model: nn.Module,
        *,
        loss_fn: LossFn | None = None,
        parallelize_fn: ParallelizeFnProtocol | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> "AutoPipeline":
        """Cut the model, and keep the stages of this rank; all ranks call it alike.

        Without a `loss_fn` the model returns its loss itself. `parallelize_fn` is called once for every stage of this
        rank, and changes it in place. A model that is not of Hugging Face needs an example batch: `args`, `kwargs`.
        """
        config = self.config
        check_build(config, model, parallelize_fn)
        model.to(device=config.device, dtype=config.dtype)
        call, parts = Call.of(config, model), list[nn.Module]()
        example = example_of(config, model, args, kwargs or {}, loss_fn is not None)
        plan = plan_of(config, model, replace(example, kwargs=call.kwargs(example.kwargs)), loss_fn is not None)

        def take(stage: nn.Module) -> None:
            if parallelize_fn is not None:
                parallelize(parallelize_fn, config, stage)
            parts.append(stage)

        pipeline = Pipeline(
            model,
            plan,
            loss_fn=call.loss_fn(loss_fn),
            mesh=pipeline_mesh(config),
            parallelize_fn=take,
            reduction="mean" if config.scale_grads_in_schedule else "sum",
        )
        self.info = PipelineInfo.of(TrainingSchedule(_name(config, plan), pipeline, call), parts)
        return self

    def step(self, *args: Any, target: Any = None, losses: list[Tensor] | None = None, **kwargs: Any) -> Result:
        """Forward and backward of one batch, the same call on every rank; `losses` then holds those of microbatches."""
        return self._schedule.step(*args, target=target, losses=losses, **kwargs)

    def eval(self, *args: Any, target: Any = None, losses: list[Tensor] | None = None, **kwargs: Any) -> Result:
        """Forward of one batch in eval mode, without gradients; `return_outputs=True` brings the outputs."""
        return self._schedule.eval(*args, target=target, losses=losses, **kwargs)

    @property
    def parts(self) -> list[nn.Module]:
        """This rank's stages, under the names that their modules have in the model."""
        _ = self._schedule
        return self.info.model_parts or []

    @property
    def pipeline(self) -> Pipeline:
        """The Pipeline behind, for what else it can do; nothing was measured, so that it predicts no times."""
        return self._schedule.pipeline

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, tied ones once."""
        return self.pipeline.parameters()

    def list_stage_modules(self) -> list[list[str]]:
        """For each of this rank's stages the names of its modules."""
        return [module_names(part) for part in self.parts]

    def get_stage_param_counts(self, trainable_only: bool = False) -> list[int]:
        """The number of parameters of each of this rank's stages."""
        return [num_parameters([part], trainable_only) for part in self.parts]

    def get_total_param_count(self, trainable_only: bool = False) -> int:
        """The number of parameters of this rank, tied ones once."""
        return num_parameters(self.parts, trainable_only)

    def pretty_print_stages(self, max_modules_per_stage: int = 16, trainable_only: bool = False) -> str:
        """This rank's stages in words, with their first modules."""
        _ = self._schedule
        return stages_text(self.info, max_modules_per_stage, trainable_only)

    def debug_summary(self) -> str:
        """The figures of the pipeline and of this rank."""
        return pipeline_text(self._schedule, self.info)

    def log_debug_summary(self) -> None:
        """Log the summary and the stages, at the level INFO of the logger `penstock.auto.pipeline`."""
        _LOG.info("%s\n%s", self.debug_summary(), self.pretty_print_stages())

    def scale_grads_by_divisor(self, divisor: float | Tensor) -> None:
        """Divide this rank's gradients; all ranks divide by the same."""
        number = divisor.item() if isinstance(divisor, Tensor) and divisor.numel() == 1 else divisor
        if not is_finite(number) or not number:
            raise RunError("a divisor is a finite number other than 0", given=repr(divisor))
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(number)

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm over all ranks is at most `max_norm`; returns the norm before."""
        return self.pipeline.clip_grad_norm_(max_norm, norm_type)

    def visualize_current_schedule(self, filename: str | Path = "schedule.png") -> None:
        """Draw the schedule into a .png, .svg or .html file."""
        draw(self._schedule.order, self._schedule.name, filename)

    @property
    def _schedule(self) -> TrainingSchedule:
        if self.info.schedule is None:
            raise RunError("there is no pipeline yet", hint="AutoPipeline(config).build(model, loss_fn=...)")
        return self.info.schedule


def _checked(config: object) -> AutoPipelineConfig:
    if not isinstance(config, AutoPipelineConfig):
        hint = "AutoPipeline(AutoPipelineConfig(world_mesh=...))"
        raise PlanError("AutoPipeline takes an AutoPipelineConfig", given=type(config).__name__, hint=hint)
    return config


def _name(config: AutoPipelineConfig, plan: Plan) -> str:
    """What the schedule is called, or the file that it comes from."""
    given = config.pp_schedule_csv
    if given is None:
        return schedule_name(config, plan.num_stages)
    return "a CSV" if "\n" in str(given) else Path(given).name
