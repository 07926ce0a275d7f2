"""Inside: finds tensors in objects that are no known containers, wherever Python lets an object keep them."""

import functools
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from penstock.ir import leaves, take_apart


def holds_tensors(thing: object, depth: int = 4) -> bool:
    """Whether an object has tensors somewhere inside; modules are looked into by nobody, their tensors have names."""
    if isinstance(thing, Tensor):
        return True
    if depth == 0 or isinstance(thing, type | types.ModuleType | nn.Module):
        return False
    return any(holds_tensors(item, depth - 1) for item in _inside(thing))


def _inside(thing: Any) -> Iterator[Any]:
    """What an object holds: items, attributes, slots, and what a function remembers of where it was made."""
    if take_apart(thing):
        yield from leaves(thing)
    elif isinstance(thing, set | frozenset | deque):
        yield from thing
    elif isinstance(thing, functools.partial):
        yield from (thing.func, *thing.args, *thing.keywords.values())
    elif isinstance(thing, types.FunctionType):
        yield from (*_remembered(thing), *(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values())
    elif isinstance(thing, types.GeneratorType):
        yield from thing.gi_frame.f_locals.values() if thing.gi_frame else ()
    else:
        # Methods, those of tensors too, know whose they are.
        yield from (getattr(thing, "__self__", None), getattr(thing, "__func__", None))
        yield from getattr(thing, "__dict__", {}).values()
        names = (name for kind in type(thing).__mro__ for name in _slots(kind))
        yield from (getattr(thing, name) for name in names if hasattr(thing, name))


def _remembered(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            # Named by the function, and not yet there.
            continue


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
