"""Form: everything that a recording depends on besides the content of the batch."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from penstock.capture.contents import PLAIN, content_of, said_by
from penstock.capture.leaves import Granularity
from penstock.capture.mentions import mentioned

_TORCHS = frozenset(vars(nn.Module()))
"""what every module has, and is looked at by other means"""
_KINDS = frozenset(PLAIN)


def batch_form(leaves: Mapping[str, object]) -> Any:
    """Equal for two batches exactly if one recording may serve both, as far as can be told before looking at numbers.

    Batches are given as their leaves by name.
    """
    tensors = [leaf for leaf in leaves.values() if isinstance(leaf, Tensor)]
    return (
        tuple((name, _leaf_form(leaf)) for name, leaf in leaves.items()),
        tuple(next(place for place, other in enumerate(tensors) if other is leaf) for leaf in tensors),
    )


def model_form(model: nn.Module, granularity: Granularity, volatile: Collection[str] = ()) -> Any:
    """Equal for a model at two times exactly if a recording made at one of them holds at the other.

    `volatile` names settings that change by themselves, and so are none.
    """
    leaves, modules = granularity.found(model), list(model.modules())
    opened = _opened(modules, leaves)
    found = _settings(leaves, opened)
    return (
        tuple([(one.dtype, one.requires_grad, one.device) for module in modules for one in _state(module)]),
        tuple([(id(one), one.training) for one in modules]),
        tuple(map(_own_form, opened)),
        tuple([item for item in found.items() if item[0] not in volatile]),
        _modes(),
    )


def settings(model: nn.Module, granularity: Granularity) -> dict[str, object]:
    """What the code between leaves may go by, by name, and that a user may change between two steps."""
    leaves = granularity.found(model)
    return _settings(leaves, _opened(model.modules(), leaves))


def _opened(modules: Any, leaves: Mapping[str, nn.Module]) -> list[nn.Module]:
    inside = {id(part) for leaf in leaves.values() for part in leaf.modules()}
    return [module for module in modules if id(module) not in inside]


def _settings(leaves: Mapping[str, nn.Module], opened: list[nn.Module]) -> dict[str, object]:
    """Attributes of opened modules, plain ones of leaves, and what the code of opened modules mentions."""
    found: dict[str, object] = {}
    for place, module in enumerate(opened):
        for name, value in vars(module).items():
            if name not in _TORCHS:
                found[f"{place}/{name}"] = content_of(value)
    for path, leaf in leaves.items():
        for name, value in vars(leaf).items():
            # Other things of a leaf are seldom looked at from outside, and often its own business.
            if type(value) in _KINDS and name not in _TORCHS:
                found[f"{path}.{name}"] = type(value), value
    return found | mentioned(dict.fromkeys(map(type, opened)))


def _own_form(module: nn.Module) -> tuple[object, ...]:
    hooks = (*module._forward_hooks, "pre", *module._forward_pre_hooks)
    return hooks, tuple(map(id, (*module._parameters.values(), *module._buffers.values())))


def _state(module: nn.Module) -> Iterator[Tensor]:
    return (one for kind in (module._parameters, module._buffers) for one in kind.values() if one is not None)


def _modes() -> tuple[object, ...]:
    autocast = tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))
    return torch.is_grad_enabled(), autocast, torch.get_default_dtype()


def _leaf_form(leaf: object) -> object:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    return type(leaf), said_by(leaf)
