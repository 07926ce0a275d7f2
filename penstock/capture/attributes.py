"""Attributes: what modules of the user keep besides parameters, buffers, parts and hooks."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from penstock.ir import leaves

_TORCHS = frozenset(vars(nn.Module()))
"""what every module has"""
_CONTAINERS = (list, tuple, dict)
_PLAIN = (bool, int, float, str, type(None))


def own_attributes(module: nn.Module) -> Iterator[Any]:
    """What a module holds by names of its own, also inside containers, but for numbers and texts."""
    for name, value in vars(module).items():
        if name not in _TORCHS and type(value) not in _PLAIN:
            # Looking into everything would wake up configurations, which are slow to answer.
            yield from leaves(value) if isinstance(value, _CONTAINERS) else (value,)


def kept_objects(modules: Iterable[nn.Module]) -> dict[int, Any]:
    """Objects that modules hold, and what these hold themselves, by identity; a configuration counts once."""
    found: dict[int, Any] = {}
    for module in modules:
        for thing in own_attributes(module):
            if id(thing) not in found:
                found[id(thing)] = thing
                found |= {id(inner): inner for inner in getattr(thing, "__dict__", {}).values()}
    return found
