"""MECHANISM: Program + StageCosts + Cluster -> Trace, by walking ranks and links together."""

from penstock.simulate.run import simulate

__all__ = ["simulate"]
