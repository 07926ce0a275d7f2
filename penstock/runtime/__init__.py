"""Runs a plan: stages, messages between ranks, losses, gradients and recorded traces."""

from penstock.runtime.agreement import Agreement, checksum, first_difference
from penstock.runtime.asynchronous import AsyncEngine, PendingResult, make_optimizer
from penstock.runtime.broadcast import gather_tensors
from penstock.runtime.compile import message_key
from penstock.runtime.distributed_parameters import shard_like, whole
from penstock.runtime.engine import Engine
from penstock.runtime.executor import RankProgram, Run, located_error, watch_step
from penstock.runtime.gradients import (
    ReplicaReducer,
    TiedParameter,
    TiedReducer,
    check_clipping,
    clip,
    global_norm,
)
from penstock.runtime.groups import ProcessGroups, mesh_sizes
from penstock.runtime.inputs import INPUTS
from penstock.runtime.loss_head import LossHead, MicrobatchWarning, check_gradient, checked_loss
from penstock.runtime.meta_init import unsaved_buffer_names
from penstock.runtime.model_part import LOSS_FN, ModelPart, check_tied_weights
from penstock.runtime.monitor import RankMonitor
from penstock.runtime.options import RunOptions
from penstock.runtime.outputs import OutputDims, check_output_dims, merge
from penstock.runtime.scaler import GradScaler
from penstock.runtime.stale_weights import StaleWeights
from penstock.runtime.step import Result
from penstock.runtime.sync import MAX_CONTENT, MAX_REDUCED, RankSync, SyncRequest, SyncResult, SyncVote
from penstock.runtime.tensor_json import FindTensor, Tensors, decode_tree, encode_tree, json_bytes, parse_json
from penstock.runtime.token_budget import balanced_shares
from penstock.runtime.transports import (
    MessageKey,
    RecvSlot,
    Route,
    SendSlot,
    TensorCodec,
    Transport,
    make_transport,
)
from penstock.runtime.user_stages import StageOutput, UserStage, UserStageEngine, sent_values

__all__ = [
    "INPUTS",
    "LOSS_FN",
    "MAX_CONTENT",
    "MAX_REDUCED",
    "Agreement",
    "AsyncEngine",
    "Engine",
    "FindTensor",
    "GradScaler",
    "LossHead",
    "MessageKey",
    "MicrobatchWarning",
    "ModelPart",
    "OutputDims",
    "PendingResult",
    "ProcessGroups",
    "RankMonitor",
    "RankProgram",
    "RankSync",
    "RecvSlot",
    "ReplicaReducer",
    "Result",
    "Route",
    "Run",
    "RunOptions",
    "SendSlot",
    "StageOutput",
    "StaleWeights",
    "SyncRequest",
    "SyncResult",
    "SyncVote",
    "TensorCodec",
    "Tensors",
    "TiedParameter",
    "TiedReducer",
    "Transport",
    "UserStage",
    "UserStageEngine",
    "balanced_shares",
    "check_clipping",
    "check_gradient",
    "check_output_dims",
    "check_tied_weights",
    "checked_loss",
    "checksum",
    "clip",
    "decode_tree",
    "encode_tree",
    "first_difference",
    "gather_tensors",
    "global_norm",
    "json_bytes",
    "located_error",
    "make_optimizer",
    "make_transport",
    "merge",
    "mesh_sizes",
    "message_key",
    "parse_json",
    "sent_values",
    "shard_like",
    "unsaved_buffer_names",
    "watch_step",
    "whole",
]
