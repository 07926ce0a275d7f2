"""Measured: a model for one number of microbatches, as its graph and the profile of that graph."""

from collections.abc import Mapping
from typing import NamedTuple

from penstock.ir import Graph, Profile


class Measured(NamedTuple):
    """The graph of one microbatch and what its nodes cost."""

    graph: Graph
    profile: Profile


Models = Mapping[int, Measured]
"""by the number of microbatches"""
