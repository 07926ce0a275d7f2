"""penstock: any PyTorch model as a pipeline over several ranks, with the numbers of the unsplit model."""

from penstock.api.planning import lower, schedule, simulate, verify
from penstock.errors import PenstockError
from penstock.ir.cluster import Cluster, Link
from penstock.ir.costs import MessageCost, StageCosts, StateBytes
from penstock.ir.cuts import Cuts
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.ir.trace import Trace

__version__ = "0.1.0"
__all__ = [
    "Cluster",
    "Cuts",
    "Link",
    "MessageCost",
    "PenstockError",
    "Program",
    "Schedule",
    "StageCosts",
    "StateBytes",
    "Trace",
    "lower",
    "schedule",
    "simulate",
    "verify",
]
