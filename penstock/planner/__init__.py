"""COMPOSES partitioners x schedules x synthesis x passes x simulate -> Plan."""

from penstock.planner.between import between
from penstock.planner.measured import Measured
from penstock.planner.request import Request
from penstock.planner.resize import unsplit, with_microbatches
from penstock.planner.search import search
from penstock.planner.watch import Watch

__all__ = ["Measured", "Request", "Watch", "between", "search", "unsplit", "with_microbatches"]
