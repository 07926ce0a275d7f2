"""Steps: one batch through the pipeline of the topology, by the functions of the caller."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, optim

from penstock.errors import RunError
from penstock.flat.grid import TENSOR
from penstock.flat.hands import BackwardFn, ForwardFn, Functions, Hands
from penstock.flat.mail import Mail
from penstock.flat.pieces import pieces_of
from penstock.flat.topology import topology
from penstock.flat.walk import Walk, orders
from penstock.runtime import SyncRequest, merge

Inputs = Tensor | Sequence[Tensor] | None


def forward_backward(
    optimizer: optim.Optimizer | None,
    fwd_fn: ForwardFn,
    bwd_fn: BackwardFn | None,
    inputs: Inputs,
    num_microbatches: int = 1,
    forward_only: bool = False,
    *,
    dtype: torch.dtype | None = None,
    scatter_gather_tensors: bool = False,
) -> Any:
    """Run one batch through the pipeline, forward and, unless `forward_only`, backward; every rank calls it alike.

    `fwd_fn` is given what the stage before returned, then this rank's `inputs` (extra ones, such as targets, on any
    rank), cut into microbatches along their first dimension: bare if it is one tensor, else as a list. On the last rank
    it returns the loss. `bwd_fn(output, gradient)` may take the place of backward; on the last rank the gradient is
    None. The gradients of the optimizer are zeroed first; those of all microbatches are summed, not divided.

    Returns on the last rank what `fwd_fn` returned, of all microbatches together: tensors that carry the batch
    concatenated, single numbers such as losses summed; None on the others. `dtype` is what is expected to cross, and a
    warning says where that is otherwise: nothing is converted, so that the numbers are those of the unsplit model.
    """
    line = topology.line
    if scatter_gather_tensors and topology.is_mode_inited(TENSOR):
        raise RunError(
            "values are sent whole: scatter_gather_tensors over several tensor ranks is not there",
            tensor_ranks=topology.get_tp_size(),
            hint="scatter_gather_tensors=False",
        )
    is_training = not forward_only
    with line.call(is_training) as number:
        pieces = pieces_of(line, _occasion(number, num_microbatches, forward_only), inputs, num_microbatches)
        if optimizer is not None and is_training:
            optimizer.zero_grad()
        hands = Hands(Functions(fwd_fn, bwd_fn, dtype), pieces.extras, line.is_last)
        walk = Walk(line, Mail(line.between, number), hands, is_training)
        walk.run(orders(line.groups.num_ranks, len(pieces.sizes), is_training)[line.groups.rank])
        for module in list(line.replicated or ()):
            module.reduce_gradients()
        if not line.is_last:
            return None
        results = [hands.results[microbatch] for microbatch in range(len(pieces.sizes))]
        return merge(results, pieces.sizes, [1.0] * len(results))


def forward_eval(fwd_fn: ForwardFn, inputs: Inputs, dtype: torch.dtype | None = None) -> Any:
    """The forward of a whole batch without gradients; what the last stage returns, on the last rank."""
    return forward_backward(None, fwd_fn, None, inputs, 1, True, dtype=dtype)


def _occasion(number: int, num_microbatches: int, forward_only: bool) -> SyncRequest:
    words = f"num_microbatches={num_microbatches}" + (", forward_only=True" if forward_only else "")
    return SyncRequest("forward_backward", number, words)
