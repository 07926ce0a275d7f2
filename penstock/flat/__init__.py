"""Pipelines written by hand: a model as a list of modules, and a training loop of the caller's own.

model.py       flatten_model: the list, and the part of it that a rank holds
topology.py    process groups by dimension (data, pipe, tensor), and the pipeline of this process
step.py        forward_backward: one batch through the pipeline; DDP and clipping
"""

from penstock.flat.model import flatten_model, partition_balanced, partition_uniform
from penstock.flat.step import DDP, clip_grad_norm_, forward_backward, forward_eval
from penstock.flat.topology import topology

__all__ = [
    "DDP",
    "clip_grad_norm_",
    "flatten_model",
    "forward_backward",
    "forward_eval",
    "partition_balanced",
    "partition_uniform",
    "topology",
]
