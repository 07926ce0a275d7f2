"""Replicated: a stage with copies in other pipelines, whose gradients are averaged at the end of forward_backward."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from penstock.errors import RunError
from penstock.flat.grid import DATA
from penstock.flat.topology import topology
from penstock.runtime import ReplicaReducer


class DDP(nn.Module):
    """A stage of this pipeline and its copies along the dimension "data"; without such a dimension, the stage itself.

    All copies begin with the parameters and buffers of the first one. Buffers are not compared afterwards: what a batch
    norm has seen is that of its own samples. Gradients are averaged once for all microbatches of a forward_backward.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._groups = topology.line.groups
        if topology.is_mode_inited(DATA):
            group = topology.get_group(DATA)
            for tensor in (*module.parameters(), *module.buffers()):
                content = tensor.detach().contiguous()
                self._groups.run(dist.broadcast, content, group=group, group_src=0, async_op=True)
                tensor.detach().copy_(content)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the stage returns."""
        if torch.is_grad_enabled() and self._groups.replicas is not None:
            if topology.line.replicated is None:
                raise RunError(
                    "gradients made outside of forward_backward would not be averaged over the replicas",
                    hint="torch.no_grad() to evaluate, or torch's DistributedDataParallel without a pipeline",
                )
            topology.line.replicated[self] = None
        return self.module(*args, **kwargs)

    def reduce_gradients(self) -> None:
        """Average the gradients over all copies; every copy calls it, and forward_backward does."""
        averages = ReplicaReducer(self._groups, {0: list(self.module.parameters())})
        averages.start(0)
        averages.finish()
