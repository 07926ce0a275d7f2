"""Pipelines written by hand: a model as a list of modules, and a training loop of the caller's own."""

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
