"""Form: everything that a recording depends on besides the content of the batch."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from penstock.capture.leaves import Granularity

_PLAIN = (bool, int, float, str, type(None))
_TORCHS = frozenset(vars(nn.Module()))
"""what every module has, and is looked at by other means"""
_DEPTH, _LONGEST = 5, 256
"""how far and how much of a setting is looked at"""


def batch_form(leaves: Mapping[str, object]) -> Any:
    """Equal for two batches exactly if one recording may serve both, as far as can be told before looking at numbers.

    Batches are given as their leaves by name.
    """
    tensors = [leaf for leaf in leaves.values() if isinstance(leaf, Tensor)]
    return (
        tuple((name, _leaf_form(leaf)) for name, leaf in leaves.items()),
        tuple(next(place for place, other in enumerate(tensors) if other is leaf) for leaf in tensors),
    )


def model_form(model: nn.Module, granularity: Granularity) -> Any:
    """Equal for a model at two times exactly if a recording made at one of them holds at the other."""
    modes = (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"))
    return *_modules_form(model, granularity), modes


def _leaf_form(leaf: object) -> object:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    return type(leaf), leaf if isinstance(leaf, _PLAIN) else repr(leaf)


def _modules_form(model: nn.Module, granularity: Granularity) -> tuple[tuple[object, ...], tuple[object, ...]]:
    """Which modules there are, in which mode and with what state.

    Of opened ones also what the user may have set between two steps.
    """
    modules = list(model.modules())
    inside = {id(part) for leaf in granularity.found(model).values() for part in leaf.modules()}
    state = [tensor for module in modules for kind in (module._parameters, module._buffers) for tensor in kind.values()]
    return (
        tuple((one.dtype, one.requires_grad, one.device) for one in state if one is not None),
        tuple((id(one), one.training, None if id(one) in inside else _own_form(one)) for one in modules),
    )


def _own_form(module: nn.Module) -> tuple[object, ...]:
    hooks = (*module._forward_hooks, "pre", *module._forward_pre_hooks)
    state = tuple(map(id, (*module._parameters.values(), *module._buffers.values())))
    own = tuple((name, _value_form(value, _DEPTH)) for name, value in vars(module).items() if name not in _TORCHS)
    return hooks, state, own


def _value_form(value: object, depth: int) -> object:
    """A setting by its content, down to some depth: numbers, names, types, lists, dicts and configurations."""
    if isinstance(value, (*_PLAIN, torch.dtype, torch.device)):
        return value
    if depth and isinstance(value, dict) and len(value) <= _LONGEST:
        return tuple((str(key), _value_form(item, depth - 1)) for key, item in value.items())
    if depth and isinstance(value, list | tuple) and len(value) <= _LONGEST:
        return tuple(_value_form(item, depth - 1) for item in value)
    if (
        depth
        and not isinstance(value, nn.Module | Tensor | type)
        and not callable(value)
        and hasattr(value, "__dict__")
    ):
        return id(value), _value_form(vars(value), depth - 1)
    return id(value)
