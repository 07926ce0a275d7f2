"""Checkpoints: state by original parameter name, written by all ranks and readable with any plan.

manifest.py         the list of a checkpoint's files with their digests
tensor_file.py      reads and writes single files; tensors as safetensors
directory.py        a directory of checkpoints: names, renaming, removing, listing
locks.py            locks, so that no checkpoint is removed while it is read
saving.py           Saver: the files of each rank, and the manifest
writer.py           writes them, in a thread if asked to
run_state.py        RunState: steps taken, position, extra and scaler, as they are written and read
reader.py           CheckpointReader: documents and tensors of one checkpoint
loading.py          Loader: each rank reads its part of the newest good checkpoint
names.py            tensors of a checkpoint for the names of a model
sources.py          directories that Hugging Face's save_pretrained wrote
optimizer_state.py  optimizer state by parameter name; lr_scheduler_state.py: that of learning-rate schedulers
periodic.py         saves a training loop every few steps, and resumes it
collective.py       errors that are raised on all ranks or on none
"""

from penstock.checkpoint.directory import (
    TEMPORARY,
    CheckpointDir,
    find_checkpoints,
    is_checkpoint,
    list_checkpoints,
    open_newest,
    open_tensors,
    verify_checkpoints,
    with_checkpoints,
)
from penstock.checkpoint.loading import Loader, LoadTargets
from penstock.checkpoint.locks import VanishedError, lock_exclusively
from penstock.checkpoint.manifest import check_digests, read_manifest, step_of
from penstock.checkpoint.names import LOSS_STATE, ModelNames, match_names
from penstock.checkpoint.periodic import Batches, PeriodicSaver, batches_from
from penstock.checkpoint.reader import CONFIG, PLAN, CheckpointReader, Loaded, TensorReader
from penstock.checkpoint.run_state import RUN, FitProgress, RunState
from penstock.checkpoint.saving import CheckpointOptions, Saver
from penstock.checkpoint.tensor_file import DTYPES
from penstock.checkpoint.writer import BackgroundWriter, CheckpointWriter
