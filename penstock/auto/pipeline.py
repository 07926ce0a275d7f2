"""AutoPipeline: builds a pipeline from a configuration, with the method names of NVIDIA's AutoPipeline."""

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.api.arguments import LossFn, check_split
from penstock.api.pipeline import Pipeline
from penstock.api.simulation import simulate
from penstock.auto.config import AutoPipelineConfig
from penstock.auto.planning import example_of, plan_of, schedule_name
from penstock.batches import Split
from penstock.errors import PlanError, RunError, ViewError
from penstock.ir import Schedule, Trace, as_int, counted, html_page, is_finite, write_atomic
from penstock.runtime import Result, RunOptions
from penstock.views import Timeline

_LOG = logging.getLogger(__name__)
_BUILD_HINT = "AutoPipeline(config).build(model, loss_fn=...)"


class ParallelizeFnProtocol(Protocol):
    """A function that changes one stage in place, for example with `fully_shard`.

    It is called with the stage, `world_mesh` and `moe_mesh`, and the keyword arguments pp_enabled, dp_axis_names,
    cp_axis_name, tp_axis_name, ep_axis_name and ep_shard_axis_names of the configuration.
    """

    def __call__(
        self,
        model: nn.Module,
        world_mesh: DeviceMesh,
        moe_mesh: DeviceMesh | None,
        *,
        pp_enabled: bool,
        dp_axis_names: tuple[str, ...],
        **axes: Any,
    ) -> None: ...


class TrainingSchedule:
    """Runs a Pipeline with the call of torch's schedules, the same on every rank unless built with `inputs="first"`."""

    def __init__(self, name: str, pipeline: Pipeline, cache: bool | None, takes_logits: bool) -> None:
        """`cache` is passed to the model as `use_cache` unless it is None; the loss function may take the logits."""
        self.name = name
        """the name of the schedule, or of its CSV file"""
        self.pipeline = pipeline
        self._cache, self._takes_logits = cache, takes_logits

    @property
    def order(self) -> Schedule:
        """The order of passes on every rank."""
        return self.pipeline.plan.schedule

    @property
    def n_microbatches(self) -> int:
        """The number of microbatches per batch."""
        return self.order.num_microbatches

    def step(self, *args: Any, target: Any = None, losses: list[Tensor] | None = None, **kwargs: Any) -> Result:
        """Forward and backward of one batch; fills `losses` with the loss of every microbatch, on every rank.

        Gradients are added to existing ones: summed over microbatches, or averaged with `scale_grads_in_schedule`.
        """
        return self._run(self.pipeline.step, args, target, losses, kwargs)

    def eval(self, *args: Any, target: Any = None, losses: list[Tensor] | None = None, **kwargs: Any) -> Result:
        """Forward of one batch in eval mode, without gradients; `return_outputs=True` returns the outputs."""
        return self._run(self.pipeline.eval, args, target, losses, kwargs)

    def _run(
        self,
        call: Callable[..., Result],
        args: tuple[Any, ...],
        target: Any,
        losses: list[Tensor] | None,
        kwargs: Mapping[str, Any],
    ) -> Result:
        result = call(*args, target=target, losses=losses, **_with_cache(self._cache, kwargs))
        return replace(result, outputs=_logits(result.outputs)) if self._takes_logits else result


def _with_cache(cache: bool | None, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments with `use_cache`, unless the call has it or the model does not."""
    return dict(kwargs) if cache is None else {"use_cache": cache, **kwargs}


def _logits(output: Any) -> Any:
    """The logits of an output that has them, else the output."""
    return output["logits"] if isinstance(output, Mapping) and "logits" in output else output


@dataclass(frozen=True)
class StageInfo:
    """One stage of this process, and its position in the pipeline."""

    stage_index: int
    num_stages: int
    submod: nn.Module
    """its modules, under their original names"""

    @property
    def is_first(self) -> bool:
        """Whether it is the first stage of the pipeline."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Whether it is the last stage of the pipeline."""
        return self.stage_index == self.num_stages - 1


@dataclass(frozen=True)
class PipelineInfo:
    """The stages and the schedule of this process; empty before `build`."""

    enabled: bool = False
    """whether `build` was called"""
    schedule: TrainingSchedule | None = None
    """its `step` and `eval` train and evaluate"""
    has_first_stage: bool = False
    """whether this rank holds the first stage"""
    has_last_stage: bool = False
    """whether it holds the last stage"""
    model_parts: list[nn.Module] | None = None
    """this rank's stages as modules"""
    stages: list[StageInfo] | None = None
    """the same with their positions"""


class AutoPipeline:
    """`AutoPipeline(config).build(model, loss_fn=...)` holds this rank's part of a pipeline; `step` trains it.

    Args:
        config: meshes, stages, schedule and batch sizes
    """

    def __init__(self, config: AutoPipelineConfig) -> None:
        if not isinstance(config, AutoPipelineConfig):
            hint = "AutoPipeline(AutoPipelineConfig(world_mesh=...))"
            raise PlanError("config must be an AutoPipelineConfig", got=type(config).__name__, hint=hint)
        self.config = config
        self.info = PipelineInfo()

    def build(
        self,
        model: nn.Module,
        *,
        loss_fn: LossFn | None = None,
        parallelize_fn: ParallelizeFnProtocol | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        split: Split | None = None,
        inputs: str = "all",
        options: RunOptions = RunOptions(),  # noqa: B008
    ) -> "AutoPipeline":
        """Cut the model and keep the stages of this rank. Collective: all ranks call it with the same arguments.

        Args:
            model: the whole model
            loss_fn: `loss_fn(logits, target)`; None: the model returns its loss itself
            parallelize_fn: called once for every stage of this rank, which it changes in place
            args: the positional arguments of an example batch, which a model that is not from Hugging Face needs
            kwargs: its keyword arguments
            split: as in `Pipeline`
            inputs: as in `Pipeline`; with "first" the batch is passed on rank 0 only, the target there or on the rank
                of the last stage
            options: as in `Pipeline`: deadline, seed, and how NaN and Inf are handled

        Returns:
            This AutoPipeline.
        """
        config = self.config
        if not isinstance(model, nn.Module):
            raise PlanError("model must be a torch.nn.Module", got=type(model).__name__)
        for field in ("moe_mesh", "tp_axis_name", "cp_axis_name", "ep_axis_name", "ep_shard_axis_names"):
            if parallelize_fn is None and getattr(config, field) is not None:
                hint = f"build(model, parallelize_fn=...), or leave out {field}"
                raise PlanError(f"{field} needs a parallelize_fn, which it is passed to", hint=hint)
        if config.device is not None and any(parameter.is_meta for parameter in model.parameters()):
            hint = "device=None: the weights are made when a state dict is loaded"
            raise PlanError("a model on the meta device cannot be moved to a device", device=config.device, hint=hint)
        model.to(device=config.device, dtype=config.dtype)
        # A key-value cache is for generation: in training it only takes memory.
        cache = None  # the model has no use_cache
        if "use_cache" in inspect.signature(model.forward).parameters:
            configured = getattr(getattr(model, "config", None), "use_cache", None)
            cache = False if config.patch_inner_model else configured
        check_split(split, model)
        example, rules = example_of(config, model, args, kwargs or {}, loss_fn is not None, split)
        example = example._replace(kwargs=_with_cache(cache, example.kwargs))
        plan = replace(plan_of(config, model, example, loss_fn is not None), split=tuple(rules.items()))
        parts: list[nn.Module] = []

        def take_stage(stage: nn.Module) -> None:
            """The Pipeline calls its parallelize_fn for every stage of this rank: here also to collect them."""
            if parallelize_fn is not None:
                _parallelize(parallelize_fn, config, stage)
            parts.append(stage)

        takes_logits = config.patch_causal_lm_model
        wrapped = loss_fn
        if loss_fn is not None and takes_logits:
            wrapped = lambda output, target: loss_fn(_logits(output), target)  # noqa: E731
            # The Pipeline trains the parameters of a loss function that is a module.
            wrapped.__wrapped__ = loss_fn
        pipeline = Pipeline(
            model,
            plan,
            loss_fn=wrapped,
            mesh=config.pipeline_mesh(),
            parallelize_fn=take_stage,
            reduction="mean" if config.scale_grads_in_schedule else "sum",
            inputs=inputs,
            options=options,
            depth=config.depth,
            basic_blocks=config.basic_blocks,
        )
        csv = config.pp_schedule_csv
        if csv is None:
            title = schedule_name(config, plan.num_stages)
        else:
            # The text of a CSV may be given in place of its path.
            title = "a CSV" if "\n" in str(csv) else Path(csv).name
        stages = [StageInfo(int(part.stage_index), plan.num_stages, part) for part in parts]
        self.info = PipelineInfo(
            enabled=True,
            schedule=TrainingSchedule(title, pipeline, cache, takes_logits),
            has_first_stage=any(stage.is_first for stage in stages),
            has_last_stage=any(stage.is_last for stage in stages),
            model_parts=parts,
            stages=stages,
        )
        return self

    def step(self, *args: Any, target: Any = None, losses: list[Tensor] | None = None, **kwargs: Any) -> Result:
        """Forward and backward of one batch, called on every rank.

        Args:
            *args: positional arguments of the model
            target: given to the loss function
            losses: a list that is filled with one loss per microbatch
            **kwargs: keyword arguments of the model
        """
        return self._schedule.step(*args, target=target, losses=losses, **kwargs)

    def eval(self, *args: Any, target: Any = None, losses: list[Tensor] | None = None, **kwargs: Any) -> Result:
        """Forward of one batch in eval mode, without gradients; `return_outputs=True` returns the outputs.

        Args:
            *args: positional arguments of the model
            target: given to the loss function
            losses: a list that is filled with one loss per microbatch
            **kwargs: keyword arguments of the model, or `return_outputs`
        """
        return self._schedule.eval(*args, target=target, losses=losses, **kwargs)

    @property
    def parts(self) -> list[nn.Module]:
        """This rank's stages, with the module names of the model."""
        _ = self._schedule  # raises an error before `build`
        return self.info.model_parts or []

    @property
    def pipeline(self) -> Pipeline:
        """The underlying Pipeline. Nothing was measured, so its plan predicts no times."""
        return self._schedule.pipeline

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, tied ones once."""
        return self.pipeline.parameters()

    def list_stage_modules(self) -> list[list[str]]:
        """The module names of each of this rank's stages."""
        return [_module_names(part) for part in self.parts]

    def get_stage_param_counts(self, trainable_only: bool = False) -> list[int]:
        """The number of parameters of each of this rank's stages.

        Args:
            trainable_only: whether to count only those that require a gradient
        """
        return [_num_parameters([part], trainable_only) for part in self.parts]

    def get_total_param_count(self, trainable_only: bool = False) -> int:
        """The number of parameters of this rank, tied ones once.

        Args:
            trainable_only: whether to count only those that require a gradient
        """
        return _num_parameters(self.parts, trainable_only)

    def pretty_print_stages(self, max_modules_per_stage: int = 16, trainable_only: bool = False) -> str:
        """This rank's stages as text: position, parameters, first modules.

        Args:
            max_modules_per_stage: how many module names to show
            trainable_only: whether to count only parameters that require a gradient
        """
        limit = as_int(max_modules_per_stage)
        if limit is None or limit < 0:
            raise PlanError("max_modules_per_stage must be a whole number, 0 or more", got=repr(max_modules_per_stage))
        _ = self._schedule  # raises an error before `build`
        lines = []
        for stage in self.info.stages or ():
            marks = [word for word, holds in (("first", stage.is_first), ("last", stage.is_last)) if holds]
            position = f"stage {stage.stage_index} of {stage.num_stages}" + (f" ({', '.join(marks)})" if marks else "")
            lines.append(f"{position}: {_num_parameters([stage.submod], trainable_only):,} parameters")
            names = _module_names(stage.submod)
            lines += [f"  {name}" for name in names[:limit]]
            if len(names) > limit:
                lines.append(f"  and {counted(len(names) - limit, 'module')} more")
        return "\n".join(lines)

    def debug_summary(self) -> str:
        """The sizes of the pipeline and of this rank as text."""
        schedule, parts = self._schedule, self.parts
        order = schedule.order
        rows = {
            "schedule": schedule.name,
            "ranks": order.num_ranks,
            "stages": f"{order.num_stages}, on ranks {', '.join(map(str, order.placement.ranks))}",
            "microbatches": order.num_microbatches,
            "stages here": ", ".join(str(stage.stage_index) for stage in self.info.stages or ()),
            "parameters here": f"{_num_parameters(parts):,}, of which {_num_parameters(parts, True):,} are trained",
        }
        return "\n".join(f"{word}: {value}" for word, value in rows.items())

    def log_debug_summary(self) -> None:
        """Log the summary and the stages with level INFO to the logger `penstock.auto.pipeline`."""
        _LOG.info("%s\n%s", self.debug_summary(), self.pretty_print_stages())

    def scale_grads_by_divisor(self, divisor: float | Tensor) -> None:
        """Divide this rank's gradients; call it with the same divisor on all ranks.

        Args:
            divisor: a finite number other than 0
        """
        number = divisor.item() if isinstance(divisor, Tensor) and divisor.numel() == 1 else divisor
        if not is_finite(number) or not number:
            raise RunError("divisor must be a finite number other than 0", got=repr(divisor))
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(number)

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm over all ranks is at most `max_norm`; returns the original norm.

        Args:
            max_norm: the largest norm allowed
            norm_type: the p of the p-norm
        """
        return self.pipeline.clip_grad_norm_(max_norm, norm_type)

    def visualize_current_schedule(self, filename: str | Path = "schedule.png") -> None:
        """Draw the schedule into a .png, .svg or .html file.

        Args:
            filename: the file to write
        """
        draw_schedule(self._schedule.order, self._schedule.name, filename)

    @property
    def _schedule(self) -> TrainingSchedule:
        if self.info.schedule is None:
            raise RunError("build() must be called first", hint=_BUILD_HINT)
        return self.info.schedule


def _parallelize(function: ParallelizeFnProtocol, config: AutoPipelineConfig, stage: nn.Module) -> None:
    """Call the user's function; a module that it returns instead of changing the stage would be ignored."""
    returned: object = function(
        stage,
        config.world_mesh,
        config.moe_mesh,
        pp_enabled=True,
        dp_axis_names=config.own_dp_axis_names,
        cp_axis_name=config.cp_axis_name,
        tp_axis_name=config.tp_axis_name,
        ep_axis_name=config.ep_axis_name,
        ep_shard_axis_names=config.ep_shard_axis_names,
    )
    if isinstance(returned, nn.Module) and returned is not stage:
        kind = type(returned).__name__
        raise PlanError("parallelize_fn must change the stage in place", returned=kind, hint="return nothing")


def _module_names(part: nn.Module) -> list[str]:
    return [name for name, _ in part.named_modules() if name]


def _num_parameters(parts: Iterable[nn.Module], trainable_only: bool = False) -> int:
    """Elements of all parameters, tied ones once; of sharded ones those of all shards."""
    parameters = {id(parameter): parameter for part in parts for parameter in part.parameters()}
    return sum(each.numel() for each in parameters.values() if each.requires_grad or not trainable_only)


def draw_schedule(schedule: Schedule, name: str, path: str | Path) -> None:
    """Draw a schedule with passes of equal length into a .png, .svg or .html file."""
    formats: dict[str, Callable[[Trace], str | bytes]] = {
        ".png": lambda trace: Timeline(format="png")({name: trace}),
        ".svg": lambda trace: Timeline()({name: trace}),
        ".html": lambda trace: html_page(name, Timeline()({name: trace})),
    }
    suffix = Path(path).suffix.lower()
    if suffix not in formats:
        raise ViewError("unknown picture format", file=str(path), hint=", ".join(formats))
    write_atomic(path, formats[suffix](simulate(schedule)))  # all ranks may write the same file at once
