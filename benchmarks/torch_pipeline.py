"""The runtime of torch.distributed.pipelining on our stages, in our order or its own."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    _PipelineScheduleRuntime,
    get_schedule_class,
)

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


class TorchPipeline:
    """The stages of one rank under torch's runtime; `step` takes the whole batch on every rank."""

    def __init__(self, parts: Mapping[int, nn.Module], num_stages: int, build: Callable[[list[Any]], Any]) -> None:
        self.stages = [
            PipelineStage(part, index, num_stages, torch.device("cpu")) for index, part in sorted(parts.items())
        ]
        self._schedule = build(self.stages)
        self._is_first, self._is_last = 0 in parts, num_stages - 1 in parts

    @classmethod
    def in_order(cls, name: str, schedule: Schedule, parts: Mapping[int, nn.Module], loss: Loss) -> "TorchPipeline":
        """In the order of a schedule of ours; gpipe and 1f1b have loops of their own there, which are faster."""

        def build(stages: list[Any]) -> Any:
            if name in SINGLE:
                return SINGLE[name](stages[0], schedule.num_microbatches, loss)
            made = _PipelineScheduleRuntime(stages, schedule.num_microbatches, loss)
            with tempfile.TemporaryDirectory() as directory:
                path = Path(directory) / "order.csv"
                schedule.to_csv(path)
                made._load_csv(str(path))
            return made

        return cls(parts, schedule.num_stages, build)

    @classmethod
    def named(cls, name: str, parts: Mapping[int, nn.Module], num_stages: int, microbatches: int, loss: Loss) -> Any:
        """In the order of torch's own schedule of that name."""

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
        """Bytes of all receive buffers, which are there from the first step on."""
        infos = [
            info
            for stage in self.stages
            for table in (stage.args_recv_info, stage.grad_recv_info)
            for row in table.values()
            for info in row
        ]
        return sum(info.buffer.nbytes for info in infos if info.buffer is not None)
