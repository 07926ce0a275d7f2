"""COMPOSES partitioners x schedules x passes x simulate -> Plan."""

from penstock.planner.estimate import estimate
from penstock.planner.make import make, with_microbatches
from penstock.planner.request import Request

__all__ = ["Request", "estimate", "make", "with_microbatches"]
