"""torch.distributed.pipelining: its runtime on given stages, and its schedules built and lowered without a model."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    _PipelineScheduleRuntime,
    get_schedule_class,
)

# `planning` measures the imports of this file, which must not include penstock.
if TYPE_CHECKING:
    from penstock.ir import Schedule

Loss = Callable[[Any, Any], Tensor]
SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
NAMES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "interleaved_zb": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipe_v": "DualPipeV",
}


class _StageMetadata:
    """The attributes of a PipelineStage that torch's schedules read in their constructors."""

    has_backward = True
    submod = group = None
    device = torch.device("cpu")
    group_rank = 0

    def __init__(self, stage: int, num_stages: int, num_ranks: int) -> None:
        self.stage_index, self.num_stages, self.group_size = stage, num_stages, num_ranks
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1


def build_and_lower(name: str, ranks: int, microbatches: int) -> object:
    """Builds torch's schedule with two stages per rank, which also lowers it: shards, reductions, sends, receives."""
    second = 2 * ranks - 1 if name in ("zbv", "dualpipe_v") else ranks
    stages = [_StageMetadata(stage, 2 * ranks, ranks) for stage in (0, second)]
    return get_schedule_class(NAMES[name])(stages, microbatches)


class TorchPipeline:
    """The stages of one rank under torch's runtime; `step` takes the whole batch on every rank."""

    def __init__(self, parts: Mapping[int, nn.Module], num_stages: int, build: Callable[[list[Any]], Any]) -> None:
        self.stages = [
            PipelineStage(part, index, num_stages, torch.device("cpu")) for index, part in sorted(parts.items())
        ]
        self._schedule = build(self.stages)
        self._is_first, self._is_last = 0 in parts, num_stages - 1 in parts

    @classmethod
    def in_order(cls, name: str, schedule: "Schedule", parts: Mapping[int, nn.Module], loss: Loss) -> "TorchPipeline":
        """Runs the order of a penstock schedule; gpipe and 1f1b use torch's own classes, which are faster."""

        def build(stages: list[Any]) -> Any:
            if name in SINGLE:
                return SINGLE[name](stages[0], schedule.num_microbatches, loss)
            runtime = _PipelineScheduleRuntime(stages, schedule.num_microbatches, loss)
            with tempfile.TemporaryDirectory() as directory:
                path = Path(directory) / "order.csv"
                schedule.to_csv(path)
                runtime._load_csv(str(path))
            return runtime

        return cls(parts, schedule.num_stages, build)

    @classmethod
    def named(cls, name: str, parts: Mapping[int, nn.Module], num_stages: int, microbatches: int, loss: Loss) -> Any:
        """Runs torch's own schedule of that name."""

        def build(stages: list[Any]) -> Any:
            given = stages[0] if name in SINGLE else stages
            return get_schedule_class(NAMES[name])(given, microbatches, loss)

        return cls(parts, num_stages, build)

    def step(self, *args: Tensor, target: Tensor) -> None:
        """Forward and backward of one batch."""
        given = args if self._is_first else ()
        self._schedule.step(*given, target=target if self._is_last else None, return_outputs=False)

    @property
    def receive_bytes(self) -> int:
        """Bytes of all receive buffers, which torch allocates in the first step and keeps."""
        infos = [
            info
            for stage in self.stages
            for table in (stage.args_recv_info, stage.grad_recv_info)
            for row in table.values()
            for info in row
        ]
        return sum(info.buffer.nbytes for info in infos if info.buffer is not None)
