"""Summary: parameters and modules of this rank's stages, in figures and in words."""

from collections.abc import Iterable

from torch import nn

from penstock.auto.info import PipelineInfo
from penstock.auto.training_schedule import TrainingSchedule
from penstock.errors import PlanError
from penstock.ir import as_int, counted


def module_names(part: nn.Module) -> list[str]:
    """The modules of a part by their original names, itself left out."""
    return [name for name, _ in part.named_modules() if name]


def num_parameters(parts: Iterable[nn.Module], trainable_only: bool = False) -> int:
    """The numbers in the parameters of modules, tied ones counted once; of sharded ones those of all shards."""
    own = {id(parameter): parameter for part in parts for parameter in part.parameters()}
    return sum(one.numel() for one in own.values() if one.requires_grad or not trainable_only)


def stages_text(info: PipelineInfo, max_modules_per_stage: int, trainable_only: bool) -> str:
    """A paragraph for every stage of this rank: its place, its parameters, its first modules."""
    most = as_int(max_modules_per_stage)
    if most is None or most < 0:
        raise PlanError("max_modules_per_stage is a whole number, 0 or more", given=repr(max_modules_per_stage))
    lines = []
    for stage in info.stages or ():
        marks = [word for word, holds in (("first", stage.is_first), ("last", stage.is_last)) if holds]
        place = f"stage {stage.stage_index} of {stage.num_stages}" + (f" ({', '.join(marks)})" if marks else "")
        lines.append(f"{place}: {num_parameters([stage.submod], trainable_only):,} parameters")
        names = module_names(stage.submod)
        lines += [f"  {name}" for name in names[:most]]
        if len(names) > most:
            lines.append(f"  and {counted(len(names) - most, 'module')} more")
    return "\n".join(lines)


def pipeline_text(schedule: TrainingSchedule, info: PipelineInfo) -> str:
    """The figures of the pipeline, and those of this rank."""
    order, parts = schedule.order, info.model_parts or []
    own = [str(stage.stage_index) for stage in info.stages or ()]
    rows = {
        "schedule": schedule.name,
        "ranks": order.num_ranks,
        "stages": f"{order.num_stages}, on ranks {', '.join(map(str, order.placement.ranks))}",
        "microbatches": order.num_microbatches,
        "stages here": ", ".join(own),
        "parameters here": f"{num_parameters(parts):,}, of which {num_parameters(parts, True):,} are trained",
    }
    return "\n".join(f"{word}: {value}" for word, value in rows.items())
