"""Clipping: the norm of the gradients of all stages of the pipeline, and clipping by it."""

from collections.abc import Iterable

from torch import Tensor

from penstock.errors import RunError
from penstock.flat.grid import TENSOR
from penstock.flat.topology import topology
from penstock.runtime import SyncRequest, check_clipping, clip, global_norm


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale the gradients of all stages so that their norm together is at most `max_norm`; returns the norm before.

    Every rank of the pipeline calls it with its own parameters, and gets the same norm.
    """
    limit, power = check_clipping(max_norm, norm_type)
    if topology.is_mode_inited(TENSOR):
        raise RunError(
            "what tensor ranks hold in parts and what they hold alike cannot be told apart here",
            tensor_ranks=topology.get_tp_size(),
            hint="clip by a norm of your own over topology.get_group('model')",
        )
    line = topology.line
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    gradients = [parameter.grad for parameter in dict.fromkeys(given) if parameter.grad is not None]
    request = SyncRequest("clip_grad_norm_", line.num_calls, f"{limit:g}, {power:g}")
    norm = global_norm(line.sync, request, gradients, power)
    line.sync.close()
    if error_if_nonfinite and not norm.isfinite():
        raise RunError("the norm of the gradients is not a finite number", norm=float(norm), norm_type=power)
    clip(gradients, norm, limit)
    return norm
