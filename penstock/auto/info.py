"""PipelineInfo: what this process has of a pipeline that was built."""

from dataclasses import dataclass

from torch import nn

from penstock.auto.training_schedule import TrainingSchedule


@dataclass(frozen=True)
class StageInfo:
    """One stage of this process, and its place in the pipeline."""

    stage_index: int
    num_stages: int
    submod: nn.Module
    """its modules, under their original names"""

    @property
    def is_first(self) -> bool:
        """Whether the pipeline begins with it."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Whether the pipeline ends with it."""
        return self.stage_index == self.num_stages - 1


@dataclass(frozen=True)
class PipelineInfo:
    """What was built; before `build` there is nothing."""

    enabled: bool = False
    schedule: TrainingSchedule | None = None
    has_first_stage: bool = False
    has_last_stage: bool = False
    model_parts: list[nn.Module] | None = None
    stages: list[StageInfo] | None = None

    @classmethod
    def of(cls, schedule: TrainingSchedule, parts: list[nn.Module]) -> "PipelineInfo":
        """What there is once stages and schedule are made."""
        stages = [StageInfo(int(part.stage_index), schedule.order.num_stages, part) for part in parts]  # type: ignore[arg-type]
        has_first, has_last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
        return cls(True, schedule, has_first, has_last, parts, stages)
