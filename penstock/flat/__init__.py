"""flat: the door to a pipeline by hand, with a model as a list of modules and a loop that the caller writes."""

from penstock.flat.clipping import clip_grad_norm_
from penstock.flat.entries import flatten_model
from penstock.flat.portions import partition_balanced, partition_uniform
from penstock.flat.replicated import DDP
from penstock.flat.steps import forward_backward, forward_eval
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
