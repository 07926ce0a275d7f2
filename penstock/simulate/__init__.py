"""MECHANISM: Program + StageCosts + Cluster -> Trace, by walking ranks and links together."""

from penstock.simulate.memory import curves
from penstock.simulate.run import simulate

__all__ = [
    "curves",
    "simulate",
]
