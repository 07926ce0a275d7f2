"""Pipelines with the names of torch.distributed.pipelining, on penstock's schedules, executor and transports.

    stage = PipelineStage(module, index, num_stages, device)
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=loss_fn)
    schedule.step(x) on the first rank, schedule.step(target=y, losses=losses) on the last, schedule.step() elsewhere

A stage is a module on its own rank, written by hand or cut out of a recorded model by `pipeline`. Files in reading
order:

    stage.py         PipelineStage: a module, its index, its process group
    pipe.py          pipeline: records a model and cuts it into such modules
    schedules.py     the schedule classes, whose `step` runs a batch through the stages
    microbatch.py    chunk specs: how arguments are split and outputs are merged
    loss.py          the loss of each microbatch and its weight
    actions.py       actions under torch's names, and custom functions that replace them
"""

from penstock.pipelining.microbatch import TensorChunkSpec
from penstock.pipelining.pipe import Pipe, SplitPoint, pipe_split, pipeline
from penstock.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    _ScheduleForwardOnly,
    get_schedule_class,
)
from penstock.pipelining.stage import PipelineStage, build_stage

__all__ = [
    "Pipe",
    "PipelineScheduleMulti",
    "PipelineScheduleSingle",
    "PipelineStage",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "SplitPoint",
    "TensorChunkSpec",
    "_ScheduleForwardOnly",
    "build_stage",
    "get_schedule_class",
    "pipe_split",
    "pipeline",
]
