"""Inspects arbitrary Python objects: their contents, the origin of their code, and tensors inside them."""

import functools
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from torch import Tensor, nn

from penstock.ir import leaves, take_apart

MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""the attributes that every nn.Module has: parameters, buffers, submodules, hooks, `training`"""
PLAIN_TYPES = (bool, int, float, str, type(None))

_LIBRARIES = frozenset(("torchvision", "numpy", "transformers", "peft", "accelerate"))

Origin = Literal["torch", "library", "python", "user"]


def code_origin(module: object) -> Origin:
    """Where code comes from, by its `__module__`: torch, a known library, Python itself, or the user.

    Known libraries are those whose hooks are part of a module's computation (weight_norm, LoRA) and whose globals do
    not change between two batches. Everything else is the user's, `__main__` included.
    """
    package = str(module).partition(".")[0]
    if package == "torch":
        return "torch"
    if package in _LIBRARIES:
        return "library"
    return "python" if package in sys.stdlib_module_names and package != "__main__" else "user"


def object_items(thing: Any) -> Iterator[tuple[str, Any]]:
    """The named contents of an object: attributes, slots, and whatever a function or method is bound to.

    Containers have none; take those apart with `penstock.ir.take_apart`.
    """
    if isinstance(thing, functools.partial):
        yield from (("func", thing.func), ("args", thing.args), ("keywords", thing.keywords))
    elif isinstance(thing, types.FunctionType):
        for number, cell in enumerate(thing.__closure__ or ()):
            try:
                yield f"cell {number}", cell.cell_contents
            except ValueError:
                # The enclosing function has not assigned this variable yet.
                continue
        yield from (("defaults", thing.__defaults__), ("keyword defaults", thing.__kwdefaults__))
    elif isinstance(thing, types.GeneratorType):
        yield from thing.gi_frame.f_locals.items() if thing.gi_frame else ()
    else:
        if callable(thing):
            # Bound methods; those written in C, such as `tensor.add`, have no __func__.
            bound = ((name, getattr(thing, name, None)) for name in ("__self__", "__func__"))
            yield from (item for item in bound if item[1] is not None)
        for kind in type(thing).__mro__:
            slots = vars(kind).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if hasattr(thing, name):
                    yield name, getattr(thing, name)
        yield from getattr(thing, "__dict__", {}).items()


def holds_tensors(thing: object, depth: int = 4) -> bool:
    """Whether an object has a tensor somewhere inside.

    Modules are not looked into: their tensors have names. Neither are classes and Python modules.
    """
    if isinstance(thing, Tensor):
        return True
    if depth == 0 or isinstance(thing, type | types.ModuleType | nn.Module):
        return False
    held: Iterable[Any]
    if take_apart(thing):
        held = leaves(thing)
    elif isinstance(thing, set | frozenset | deque):
        held = thing
    else:
        held = (item for _, item in object_items(thing))
    return any(holds_tensors(item, depth - 1) for item in held)


def module_attributes(module: nn.Module) -> Iterator[Any]:
    """The values of a module's own attributes, also inside containers, except numbers and strings."""
    for name, value in vars(module).items():
        if name not in MODULE_ATTRIBUTES and type(value) not in PLAIN_TYPES:
            # Other containers, such as the configurations of Hugging Face, take long to iterate over.
            yield from leaves(value) if isinstance(value, list | tuple | dict) else (value,)


def reachable_objects(modules: Iterable[nn.Module]) -> dict[int, Any]:
    """Objects that modules hold as attributes, and the attributes of those objects, by identity."""
    found: dict[int, Any] = {}
    for module in modules:
        for thing in module_attributes(module):
            if id(thing) not in found:
                found[id(thing)] = thing
                found |= {id(inner): inner for inner in getattr(thing, "__dict__", {}).values()}
    return found


def copy_leaf(leaf: object) -> object:
    """A copy of a tensor, as a new leaf of autograd; anything else unchanged.

    For inputs of a model that may write into them.
    """
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
