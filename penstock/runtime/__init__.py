"""Runs a plan: stages, messages between ranks, losses, gradients and recorded traces."""

from penstock.runtime.adding import add_loss, added_losses, added_with_reductions
from penstock.runtime.batch_cutter import INPUTS, BatchCutter
from penstock.runtime.belongings import check_alike
from penstock.runtime.boxes import message_key
from penstock.runtime.collect import collect
from penstock.runtime.description import describe
from penstock.runtime.engine import Engine
from penstock.runtime.execute import located_error
from penstock.runtime.groups import ProcessGroups
from penstock.runtime.loss_head import LossHead
from penstock.runtime.losses.added import AddedLosses
from penstock.runtime.losses.given import REDUCTIONS
from penstock.runtime.losses.loss_value import loss_of
from penstock.runtime.losses.way import coarsest
from penstock.runtime.losses.weighing import Weighing
from penstock.runtime.merge import merge
from penstock.runtime.meta_init import unsaved_buffer_names
from penstock.runtime.model_part import ModelPart
from penstock.runtime.monitor import RankMonitor, watch_step
from penstock.runtime.norms import check_clipping, clip, global_norm
from penstock.runtime.options import RunOptions
from penstock.runtime.parity import ParityReport
from penstock.runtime.remarks import Remark
from penstock.runtime.replicas import Replicas
from penstock.runtime.result import Result
from penstock.runtime.scaler import GradScaler
from penstock.runtime.solo import Solo
from penstock.runtime.state_dict import shard_like
from penstock.runtime.sync import MAX_REDUCED, Agreement, RankSync, SyncRequest, SyncResult, SyncVote
from penstock.runtime.transports import (
    DistributedTransport,
    MessageKey,
    RecvSlot,
    Route,
    SendSlot,
    TensorCodec,
)

__all__ = [
    "INPUTS",
    "MAX_REDUCED",
    "REDUCTIONS",
    "AddedLosses",
    "Agreement",
    "BatchCutter",
    "DistributedTransport",
    "Engine",
    "GradScaler",
    "LossHead",
    "MessageKey",
    "ModelPart",
    "ParityReport",
    "ProcessGroups",
    "RankMonitor",
    "RankSync",
    "RecvSlot",
    "Remark",
    "Replicas",
    "Result",
    "Route",
    "RunOptions",
    "SendSlot",
    "Solo",
    "SyncRequest",
    "SyncResult",
    "SyncVote",
    "TensorCodec",
    "Weighing",
    "add_loss",
    "added_losses",
    "added_with_reductions",
    "check_alike",
    "check_clipping",
    "clip",
    "coarsest",
    "collect",
    "describe",
    "global_norm",
    "located_error",
    "loss_of",
    "merge",
    "message_key",
    "shard_like",
    "unsaved_buffer_names",
    "watch_step",
]
