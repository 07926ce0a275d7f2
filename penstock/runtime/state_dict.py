"""Checks that a state dict fits this rank's parameters and buffers, before any of them changes."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from penstock.errors import RunError

_HINT = "the state dict of the whole model, or of this rank"


def check_state_dict(state: Any, own: Mapping[str, Tensor], model_names: set[str]) -> None:
    """Refuse a state dict that lacks a name of `own`, or has an unknown name, another shape or a meta tensor."""
    if not isinstance(state, Mapping):
        raise RunError("a state dict must map names to tensors", given=type(state).__name__, hint=_HINT)
    missing = [name for name in own if name not in state]
    if missing:
        raise RunError("the state dict lacks parameters or buffers", missing=len(missing), first=missing[0], hint=_HINT)
    for name, value in state.items():
        if name not in model_names and name not in own:
            close = get_close_matches(str(name), model_names, n=1)
            hint = f"{close[0]!r}" if close else _HINT
            raise RunError("the model has no parameter or buffer of this name", name=repr(name), hint=hint)
        if name not in own:
            continue
        if not isinstance(value, Tensor):
            raise RunError("a state dict must map names to tensors", name=name, given=type(value).__name__, hint=_HINT)
        if value.shape != own[name].shape:
            problem = "the shape of a tensor differs from the model's"
            raise RunError(problem, name=name, given=list(value.shape), model=list(own[name].shape))
        if value.is_meta:
            raise RunError("a tensor has no values: it is on the meta device", name=name)


def shard_like(value: Tensor, own: Tensor) -> Tensor:
    """This rank's shard of a whole tensor, laid out like `own`; the tensor itself if `own` is not sharded."""
    if isinstance(own, DTensor) and not isinstance(value, DTensor):
        # Every rank has the whole tensor, so nothing needs to be sent.
        return distribute_tensor(value.to(own.device), own.device_mesh, own.placements, src_data_rank=None)
    return value
