"""COMPOSES partitioners x schedules x synthesis x passes x simulate -> Plan."""

from penstock.planner.between import between
from penstock.planner.measured import Measured
from penstock.planner.request import Request
from penstock.planner.resize import unsplit, with_microbatches
from penstock.planner.search import search

__all__ = ["Measured", "Request", "between", "search", "unsplit", "with_microbatches"]
