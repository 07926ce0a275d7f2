"""COMPOSES partitioners x schedules x synthesis x passes x simulate -> Plan."""

from penstock.planner.between import between
from penstock.planner.measured import Measured
from penstock.planner.request import AUTO, Request
from penstock.planner.resize import unsplit, with_microbatches
from penstock.planner.search import search
from penstock.planner.synthesis.making import is_too_large, synthesise
from penstock.planner.synthesis.problem import Problem
from penstock.planner.watch import Watch

__all__ = [
    "AUTO",
    "Measured",
    "Problem",
    "Request",
    "Watch",
    "between",
    "is_too_large",
    "search",
    "synthesise",
    "unsplit",
    "with_microbatches",
]
