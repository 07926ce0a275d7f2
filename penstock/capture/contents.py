"""Contents: a Python value as something that is equal again exactly if the value says the same."""

import functools
import types
from collections import deque
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

PLAIN = (bool, int, float, str, type(None))
_WORDS = (*PLAIN, complex, bytes, torch.dtype, torch.device)
_DEPTH, _LONGEST = 5, 256
"""how far and how much of a value is looked at"""


def content_of(value: object, depth: int = _DEPTH) -> object:
    """Numbers, names, lists, dicts, arrays, configurations and what functions remember, down to some depth."""
    if isinstance(value, _WORDS):
        # True, 1 and 1.0 are equal, and do not give the same results.
        return type(value), value
    if isinstance(value, np.generic):
        return type(value), value.tobytes()
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype.str, _digest(value)
    if not depth or isinstance(value, nn.Module | Tensor | type | types.ModuleType):
        return id(value)
    if isinstance(value, dict):
        return tuple((str(key), content_of(item, depth - 1)) for key, item in _first(value.items())), len(value)
    if isinstance(value, list | tuple | deque):
        return tuple(content_of(item, depth - 1) for item in _first(value)), len(value)
    if isinstance(value, set | frozenset):
        return frozenset(content_of(item, depth - 1) for item in _first(value)), len(value)
    held = _held(value)
    return (id(value), content_of(held, depth - 1)) if held else id(value)


def said_by(value: object) -> object:
    """The same for an object that another one, which holds the same, may stand for."""
    if isinstance(value, (*_WORDS, np.generic, np.ndarray)):
        return content_of(value)
    held = _held(value)
    return content_of(held) if held or hasattr(value, "__dict__") else repr(value)


def _held(thing: Any) -> dict[str, Any]:
    """What an object is made of: attributes, slots, and what a function remembers of where it was made."""
    if isinstance(thing, functools.partial):
        return {"function": thing.func, "args": thing.args, "keywords": thing.keywords}
    if isinstance(thing, types.MethodType):
        return {"function": thing.__func__, "self": thing.__self__}
    if isinstance(thing, types.FunctionType):
        cells = [_cell(cell) for cell in thing.__closure__ or ()]
        found = {"cells": cells, "defaults": thing.__defaults__, "keywords": thing.__kwdefaults__}
        return {name: held for name, held in found.items() if held}
    slots = [name for kind in type(thing).__mro__ for name in _slots(kind)]
    held = {name: getattr(thing, name) for name in slots if hasattr(thing, name)}
    return held | getattr(thing, "__dict__", {})


def _cell(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _first(items: Any) -> Iterator[Any]:
    return (item for _, item in zip(range(_LONGEST), items, strict=False))


def _digest(array: Any) -> bytes:
    if array.dtype.hasobject:
        return repr(array).encode()
    return blake2b(array.tobytes(), digest_size=16).digest()
