"""MECHANISM: Program + Stages + Transport -> losses, gradients, recorded Trace."""

from penstock.runtime.adding import add_loss, added_losses, added_with_reductions
from penstock.runtime.agreement import Form
from penstock.runtime.batch_cutter import INPUTS, BatchCutter
from penstock.runtime.belongings import check_alike
from penstock.runtime.between import Between
from penstock.runtime.boxes import way_of
from penstock.runtime.collect import collect
from penstock.runtime.crew import Crew
from penstock.runtime.description import describe
from penstock.runtime.ending import Ending
from penstock.runtime.engine import Engine
from penstock.runtime.execute import located
from penstock.runtime.lookout import Lookout
from penstock.runtime.losses.added import AddedLosses
from penstock.runtime.losses.given import REDUCTIONS
from penstock.runtime.losses.loss_value import loss_of
from penstock.runtime.losses.way import coarsest
from penstock.runtime.losses.weighing import Weighing
from penstock.runtime.meeting import Heard, Meeting, Occasion, Said
from penstock.runtime.merge import merge
from penstock.runtime.model_part import ModelPart
from penstock.runtime.norms import check_clipping, clip, global_norm
from penstock.runtime.options import RunOptions
from penstock.runtime.parity import ParityReport
from penstock.runtime.remarks import Remark
from penstock.runtime.replicas import Replicas
from penstock.runtime.result import Result
from penstock.runtime.row import MOST_FIGURES, Figures
from penstock.runtime.scaler import GradScaler
from penstock.runtime.solo import Solo
from penstock.runtime.state import spread
from penstock.runtime.state_owners import StateOwners
from penstock.runtime.transport import Arrival, Departure, Route, Way
from penstock.runtime.unsaved_buffers import unsaved_names
from penstock.runtime.wire import Wire

__all__ = [
    "INPUTS",
    "MOST_FIGURES",
    "REDUCTIONS",
    "AddedLosses",
    "Arrival",
    "BatchCutter",
    "Between",
    "Crew",
    "Departure",
    "Ending",
    "Engine",
    "Figures",
    "Form",
    "GradScaler",
    "Heard",
    "Lookout",
    "Meeting",
    "ModelPart",
    "Occasion",
    "ParityReport",
    "Remark",
    "Replicas",
    "Result",
    "Route",
    "RunOptions",
    "Said",
    "Solo",
    "StateOwners",
    "Way",
    "Weighing",
    "Wire",
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
    "located",
    "loss_of",
    "merge",
    "spread",
    "unsaved_names",
    "way_of",
]
