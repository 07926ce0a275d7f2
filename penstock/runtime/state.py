"""State: whether a state dict fits a rank's parameters and buffers, checked before any number is changed."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from penstock.errors import RunError

_HINT = "the state dict of the whole model, or of this rank"


def check_state(state: Any, own: Mapping[str, Tensor], whole: set[str]) -> None:
    """Refuse what lacks a name of `own`, has one that is none of the `whole` model, or a tensor of another shape."""
    if not isinstance(state, Mapping):
        raise RunError("a state dict has tensors by name", given=type(state).__name__, hint=_HINT)
    missing = [name for name in own if name not in state]
    if missing:
        raise RunError("numbers are missing", missing=len(missing), first=missing[0], hint=_HINT)
    for name, value in state.items():
        if name not in whole and name not in own:
            close = get_close_matches(str(name), whole, n=1)
            hint = f"{close[0]!r}" if close else _HINT
            raise RunError("the model has nothing of this name", name=repr(name), hint=hint)
        if name in own:
            _check_value(name, value, own[name])


def _check_value(name: str, value: object, own: Tensor) -> None:
    if not isinstance(value, Tensor):
        raise RunError("a state dict has tensors by name", name=name, given=type(value).__name__, hint=_HINT)
    if value.shape != own.shape:
        raise RunError(
            "a tensor has another shape than in the model", name=name, given=list(value.shape), model=list(own.shape)
        )
    if value.is_meta:
        raise RunError("a tensor has no numbers: it is on the meta device", name=name)


def spread(value: Tensor, own: Tensor) -> Tensor:
    """A whole tensor for a parameter that is sharded: this rank's part of it."""
    if isinstance(own, DTensor) and not isinstance(value, DTensor):
        # Every rank has all of it, so that nothing needs to be sent.
        return distribute_tensor(value.to(own.device), own.device_mesh, own.placements, src_data_rank=None)
    return value
