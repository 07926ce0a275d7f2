"""Makes a rank of a pipeline look like a single process to Trainer and accelerate, which support replicas only.

All ranks have the same batch and return the same loss, so for accelerate each is the only process: batches are neither
sharded nor gathered. Only rank 0 writes and logs.
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
_PRECISION = "ACCELERATE_MIXED_PRECISION"


def as_single_process(args: Any, local: bool, replicas: int) -> Any:
    """A copy of the TrainingArguments as they are for a single process."""
    rank = 0 if local or not dist.is_initialized() else dist.get_rank()
    device = args.device  # the first access initialises the device
    copied = copy.copy(args)
    copied.distributed_state = SimpleNamespace(
        num_processes=1,
        process_index=rank,
        local_process_index=0 if local else int(os.environ.get("LOCAL_RANK", rank)),
        distributed_type=DistributedType.NO,
        device=device,
    )
    copied._n_gpu = min(args.n_gpu, 1)  # several devices must not select DataParallel
    # Show NaN losses instead of replacing them by earlier ones.
    copied.logging_nan_inf_filter = False
    # Every process loads the batches of all replicas, and computes its share.
    copied.per_device_train_batch_size *= replicas
    copied.per_device_eval_batch_size *= replicas
    return copied


@contextmanager
def single_process_accelerate(args: Any) -> Iterator[None]:
    """Inside, accelerate sets up for one process, and leaves mixed precision to the pipeline."""
    own = {_DEVICE: str(args.device), _PRECISION: "no"}
    saved = {name: os.environ.pop(name) for name in (*_VARIABLES, *own) if name in os.environ}
    os.environ.update(own)
    precision = vars(args).get("mixed_precision")  # since transformers 5; before, only the variable
    if precision is not None:
        args.mixed_precision = "no"
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        PartialState(cpu=args.device.type == "cpu")
        yield
    finally:
        if precision is not None:
            args.mixed_precision = precision
        for name in own:
            del os.environ[name]
        os.environ.update(saved)


@contextmanager
def as_rank_zero(args: Any) -> Iterator[None]:
    """Inside, this is rank 0: data workers are seeded by the rank, and all ranks need the same data."""
    state = args.distributed_state
    rank, state.process_index = state.process_index, 0
    try:
        yield
    finally:
        state.process_index = rank
