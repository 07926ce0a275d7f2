"""The orders of torch.distributed.pipelining: its schedule classes, fed with stages that only say who they are."""

from pathlib import Path
from unittest.mock import patch

import torch
from torch.distributed.pipelining import schedules as pipelining

SINGLE = {"gpipe": "GPipe", "1f1b": "1F1B"}
MULTI = {
    "interleaved": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "interleaved_zb": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipe_v": "DualPipeV",
}
VEE = ("zbv", "dualpipe_v")


class FakeStage:
    """The interface that a schedule of torch needs of a stage; records the passes that it runs."""

    has_backward = True
    submod = group = None
    device = torch.device("cpu")

    def __init__(self, stage: int, num_stages: int, num_ranks: int, rank: int) -> None:
        self.stage_index, self.num_stages, self.group_size, self.group_rank = stage, num_stages, num_ranks, rank
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        self.called: list[str] = []

    def forward_one_chunk(self, microbatch: int, *_: object, **__: object) -> None:
        self.called.append(f"{self.stage_index}F{microbatch}")

    def backward_one_chunk(self, microbatch: int, *_: object, **__: object) -> None:
        self.called.append(f"{self.stage_index}B{microbatch}")

    def get_fwd_recv_ops(self, _: int) -> list[object]:
        return []

    get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = get_fwd_recv_ops

    def perform_reduce_grad(self, _: int) -> None:
        pass


def executed(name: str, ranks: int, microbatches: int) -> list[list[str]]:
    """Per rank the passes that a schedule with one stage per rank runs, in the order in which it runs them."""
    orders = []
    for rank in range(ranks):
        stage = FakeStage(rank, ranks, ranks, rank)
        schedule = pipelining.get_schedule_class(SINGLE[name])(stage, microbatches)
        with patch.object(schedule, "_initialize_stage"):
            schedule._step_microbatches()
        orders.append(stage.called)
    return orders


def stored_1f1b(ranks: int, microbatches: int) -> list[list[object]]:
    """Per rank what torch keeps as the order of its 1f1b."""
    order = pipelining.Schedule1F1B(FakeStage(0, ranks, ranks, 0), microbatches).pipeline_order
    return [order[rank] for rank in range(ranks)]


def build(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> pipelining._PipelineScheduleRuntime:
    """A schedule of torch with several stages per rank, built and lowered; a ValueError if it refuses the sizes."""
    local = (0, 2 * ranks - 1) if name in VEE else tuple(place * ranks for place in range(stages_per_rank))
    stages = [FakeStage(stage, ranks * stages_per_rank, ranks, 0) for stage in local]
    return pipelining.get_schedule_class(MULTI[name])(stages, microbatches)


def stored(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> list[list[str]] | None:
    """Per rank the passes of such a schedule as text, bubbles left out; None if torch refuses the sizes."""
    try:
        order = build(name, ranks, microbatches, stages_per_rank).pipeline_order
    except ValueError:
        return None
    return [[str(action) for action in order[rank] if action is not None] for rank in range(ranks)]


def load_csv(
    path: Path, num_stages: int, ranks: int, microbatches: int, kind: str
) -> pipelining._PipelineScheduleRuntime:
    """torch's runtime with the orders of a CSV file; kind is "compute_only" or "compute_comms"."""
    runtime = pipelining._PipelineScheduleRuntime([FakeStage(0, num_stages, ranks, 0)], microbatches)
    runtime._load_csv(str(path), kind)
    return runtime
