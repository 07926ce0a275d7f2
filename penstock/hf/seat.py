"""Seat: how a rank of a pipeline looks to a Trainer, which knows processes as replicas only.

All ranks have the same batch and bring the same loss, as if they were one process; to accelerate each is the only one.
So batches are neither shared out nor gathered. Only the first rank, by its number, writes and logs.
"""

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "PMI_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_SIZE",
)
_DEVICE = "ACCELERATE_TORCH_DEVICE"


def seated(args: Any, local: bool) -> Any:
    """The settings for one rank; those of the user stay as they are."""
    rank = 0 if local or not dist.is_initialized() else dist.get_rank()
    device = args.device  # sets up what it is asked for the first time
    found = copy.copy(args)
    found.distributed_state = SimpleNamespace(
        num_processes=1,
        process_index=rank,
        local_process_index=0 if local else int(os.environ.get("LOCAL_RANK", rank)),
        distributed_type=DistributedType.NO,
        device=device,
    )
    found._n_gpu = min(args.n_gpu, 1)  # several devices of one process are not for DataParallel
    # A loss that is no number is shown and not replaced by those before it.
    found.logging_nan_inf_filter = False
    # The state of the optimizers lies on all ranks, and no Trainer could read it back.
    found.save_only_model = True
    return found


@contextmanager
def alone(device: Any) -> Iterator[None]:
    """What accelerate sets up inside is for one process."""
    kept = {name: os.environ.pop(name) for name in (*_VARIABLES, _DEVICE) if name in os.environ}
    os.environ[_DEVICE] = str(device)
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        PartialState(cpu=device.type == "cpu")
        yield
    finally:
        del os.environ[_DEVICE]
        os.environ.update(kept)


@contextmanager
def first(args: Any) -> Iterator[None]:
    """Inside this is rank 0: workers that load data are seeded by the rank, and all ranks need the same data."""
    place = args.distributed_state
    rank, place.process_index = place.process_index, 0
    try:
        yield
    finally:
        place.process_index = rank
