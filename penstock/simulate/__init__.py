"""Prediction of a step: Program + StageCosts + Cluster -> Trace."""

from penstock.simulate.memory import memory_curves
from penstock.simulate.simulation import Makespans, simulate
