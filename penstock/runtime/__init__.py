"""Runs a plan: stages, messages between ranks, losses, gradients and recorded traces.

The files of one training step, in the order in which it enters them:

    engine.py            Engine: begins a step, runs it, ends it
    step.py              the data of a step, its Result, and the gradients and buffers before it
    inputs.py            sends the batch from the first rank, with inputs="first"; broadcast.py: nested structures
    token_budget.py      microbatches of similar lengths, with budget_tokens
    sync.py              votes of all ranks at the beginning and end of a step; agreement.py: the facts they compare
    batch_comparison.py  compares the batches of ranks
    step_compiler.py     the actions of this rank as calls
    executor.py          runs these calls; StageRunner: forward, backward and weight gradient of a stage
    transports/          messages between ranks; host_memory.py: copies between host and device
    loss_head.py         the loss of a microbatch, and warnings if it is not that of the batch
    gradients.py         sums over replicas and tied parameters; norms and clipping
    nonfinite.py         finds NaN and Inf
    outputs.py           merges the outputs of microbatches
    trace.py             the measured times as a Trace

The parts of a Pipeline before its first step:

    options.py           RunOptions
    groups.py            the process groups; monitor.py: the status of this rank, deadlines
    model_part.py        the stages of this process, and their state
    meta_init.py         models on the meta device
    initial_weights.py   checks that ranks start with the same weights
    tensor_parallel.py   parameters that are sharded over ranks, as DTensors; fsdp.py: stages with FSDP
    row_parameters.py    parameters that are rows of others, with vocabulary_shards
    stale_weights.py     refuses the user's model while other ranks train its stages
    scaler.py            GradScaler

Other ways to train:

    asynchronous.py      without a flush between batches; weight_versions.py: which weights a microbatch uses
    user_stages.py       hand-written stages

`tensor_json.py` encodes nested values with tensors for messages and checkpoints.
"""

from penstock.runtime.agreement import Agreement, checksum, first_difference
from penstock.runtime.asynchronous import AsyncEngine, make_optimizer
from penstock.runtime.broadcast import check_structure, gather_tensors
from penstock.runtime.engine import Engine
from penstock.runtime.executor import RankProgram, watch_step
from penstock.runtime.fsdp import is_fsdp_module
from penstock.runtime.gradients import (
    ReplicaReducer,
    TiedParameter,
    TiedReducer,
    check_clipping,
    clip,
    global_norm,
)
from penstock.runtime.groups import EXPERTS, PIPELINE, REPLICAS, TENSOR, ProcessGroups, mesh_sizes
from penstock.runtime.initial_weights import check_tied_weights
from penstock.runtime.inputs import INPUTS
from penstock.runtime.loss_head import LossHead, MicrobatchWarning, checked_loss, no_gradient_error
from penstock.runtime.meta_init import unsaved_buffer_names
from penstock.runtime.model_part import LOSS_FN, ModelPart
from penstock.runtime.monitor import RankMonitor
from penstock.runtime.options import RunOptions
from penstock.runtime.outputs import OutputDims, check_output_dims, merge
from penstock.runtime.scaler import GradScaler
from penstock.runtime.stale_weights import StaleWeights
from penstock.runtime.step import Result
from penstock.runtime.sync import MAX_CONTENT, MAX_REDUCED, RankSync, SyncRequest, SyncVote
from penstock.runtime.tensor_json import FindTensor, NamedTensors, decode_tree, encode_tree, json_bytes, parse_json
from penstock.runtime.tensor_parallel import distribute_like, full_tensor
from penstock.runtime.token_budget import balanced_shares
from penstock.runtime.user_stages import StageOutput, UserStage, UserStageEngine, sent_values
