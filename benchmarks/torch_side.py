"""Builds and lowers orders with torch's schedule classes, given the stages of one rank."""

import torch
from torch.distributed.pipelining.schedules import get_schedule_class

NAMES = {
    "interleaved": "Interleaved1F1B",
    "zbv": "ZBVZeroBubble",
    "interleaved_zb": "InterleavedZeroBubble",
    "looped_bfs": "LoopedBFS",
    "dualpipe_v": "DualPipeV",
}


class Stage:
    """What a schedule of torch asks of a stage while it is built."""

    has_backward = True
    submod = group = None
    device = torch.device("cpu")
    group_rank = 0

    def __init__(self, stage: int, num_stages: int, num_ranks: int) -> None:
        self.stage_index, self.num_stages, self.group_size = stage, num_stages, num_ranks
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1


def build_and_lower(name: str, ranks: int, microbatches: int) -> object:
    """The schedule with two stages per rank, lowered: unshards, reshards, reductions, sends and receives."""
    second = 2 * ranks - 1 if name in ("zbv", "dualpipe_v") else ranks
    stages = [Stage(stage, 2 * ranks, ranks) for stage in (0, second)]
    return get_schedule_class(NAMES[name])(stages, microbatches)
