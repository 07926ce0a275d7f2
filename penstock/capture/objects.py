"""Inspects arbitrary Python objects: their contents, the origin of their code, and tensors inside them."""

import functools
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils._pytree import SUPPORTED_NODES

from penstock.ir import (
    Parts,
    attributes_of,
    flatten_one_level,
    is_attributes_only,
    leaves,
    register_attributes,
    register_container,
)

MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""the attributes that every nn.Module has: parameters, buffers, submodules, hooks, `training`"""
PLAIN_TYPES = frozenset((bool, int, float, str, type(None)))

UNASSIGNED = object()
"""the content of a closure cell whose variable has not been assigned yet"""

_LIBRARIES = frozenset(("torchvision", "numpy", "transformers", "peft", "accelerate"))

Origin = Literal["torch", "library", "python", "user"]


def class_functions(kind: type) -> Iterator[tuple[str, types.FunctionType]]:
    """The functions that a class itself defines, with their names in the class.

    These are its methods, the getters of its properties, and its static and class methods.
    """
    for name, value in vars(kind).items():
        for function in (value, getattr(value, "fget", None), getattr(value, "__func__", None)):
            if isinstance(function, types.FunctionType):
                yield name, function


def code_lines(code: types.CodeType) -> Iterator[str]:
    """The code of a function and of those inside it as text, without file names and line numbers."""
    yield f"{code.co_name} {code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_freevars}"
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from code_lines(constant)
        else:
            # The order of a frozenset of strings differs between processes.
            yield repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)


@functools.lru_cache(maxsize=4096)
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


def user_line() -> str:
    """The innermost line of the call stack that is neither torch's nor Python's nor penstock's, as `file.py:12`."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if runs_model_code(frame):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def runs_model_code(frame: types.FrameType) -> bool:
    """Whether the code of a frame is neither torch's nor numpy's nor Python's nor penstock's."""
    module = frame.f_globals.get("__name__", "")
    return code_origin(module) in ("library", "user") and module.partition(".")[0] not in ("penstock", "numpy")


def closure_contents(function: types.FunctionType) -> Iterator[Any]:
    """The values of the variables that a function holds in its closure, UNASSIGNED for those without one."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            yield UNASSIGNED


def object_items(value: Any) -> Iterator[tuple[str, Any]]:
    """The named contents of an object: attributes, slots, and the values that a function or method is bound to.

    Containers have none: `penstock.ir.flatten_one_level` returns the items of those.
    """
    if isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, types.FunctionType):
        for number, content in enumerate(closure_contents(value)):
            if content is not UNASSIGNED:
                yield f"cell {number}", content
        yield from (("defaults", value.__defaults__), ("keyword defaults", value.__kwdefaults__))
    elif isinstance(value, types.GeneratorType):
        yield from value.gi_frame.f_locals.items() if value.gi_frame else ()
    else:
        if callable(value):
            # Bound methods; those written in C, such as `tensor.add`, have no __func__.
            bound = ((name, getattr(value, name, None)) for name in ("__self__", "__func__"))
            yield from (item for item in bound if item[1] is not None)
        for kind in type(value).__mro__:
            slots = vars(kind).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if hasattr(value, name):
                    yield name, getattr(value, name)
        yield from getattr(value, "__dict__", {}).items()


def holds_tensors(value: object, depth: int = 4) -> bool:
    """Whether an object has a tensor somewhere inside.

    Modules are not looked into: their tensors have names. Neither are classes and Python modules.
    """
    if isinstance(value, Tensor):
        return True
    if depth == 0 or isinstance(value, type | types.ModuleType | nn.Module):
        return False
    held: Iterable[Any]
    if flatten_one_level(value):
        held = leaves(value)
    elif isinstance(value, set | frozenset | deque):
        held = value
    else:
        held = (item for _, item in object_items(value))
    return any(holds_tensors(item, depth - 1) for item in held)


def register_containers(structure: object) -> bool:
    """Register the classes of objects in a structure that hold tensors as containers; returns whether some were new.

    Examples are key-value caches. A class that is registered with torch's pytree is taken apart by its functions, any
    other into its attributes. Objects that are more than their attributes, or that refer to themselves, stay leaves.
    """
    is_new = False
    for leaf in leaves(structure):
        # Most leaves are tensors and plain values.
        if isinstance(leaf, Tensor) or type(leaf) in PLAIN_TYPES or not holds_tensors(leaf):
            continue
        if register_class_of(leaf):
            is_new = True
            register_containers(leaf)
    return is_new


def register_class_of(value: object) -> bool:
    """Register the class of an object as a container; returns False if its objects cannot be built again."""
    kind = type(value)
    if kind in SUPPORTED_NODES:
        node = SUPPORTED_NODES[kind]

        def flatten(value: Any) -> Parts:
            items, context = node.flatten_fn(value)
            return Parts(kind, (*range(len(items)), "context"), (*items, context))

        def unflatten(_: Sequence[Any], items: Sequence[Any]) -> Any:
            return node.unflatten_fn(items[:-1], items[-1])

        register_container(kind, flatten, unflatten)
    elif is_attributes_only(kind) and not _has_cycle(value):
        register_attributes(kind)
    else:
        return False
    return True


def _has_cycle(value: object, ancestors: tuple[int, ...] = ()) -> bool:
    if id(value) in ancestors:
        return True
    parts = flatten_one_level(value) or (attributes_of(value) if is_attributes_only(type(value)) else None)
    return parts is not None and any(_has_cycle(item, (*ancestors, id(value))) for item in parts.items)


def module_attributes(module: nn.Module) -> Iterator[Any]:
    """The values of a module's own attributes, also inside containers, except numbers and strings."""
    for name, value in vars(module).items():
        if name not in MODULE_ATTRIBUTES and type(value) not in PLAIN_TYPES:
            # Other containers, such as the configurations of Hugging Face, take long to iterate over.
            yield from _objects_in(value) if isinstance(value, list | tuple | dict) else (value,)


def _objects_in(value: object) -> Iterator[Any]:
    """The leaves of a value, except numbers and strings."""
    if not isinstance(value, list | tuple | dict):
        yield from leaves(value)
        return
    items = value.values() if isinstance(value, dict) else value
    # Decided at once: a vocabulary has hundreds of thousands of items.
    if not PLAIN_TYPES.issuperset(map(type, items)):
        for item in items:
            if type(item) not in PLAIN_TYPES:
                yield from _objects_in(item)


def reachable_objects(modules: Iterable[nn.Module]) -> dict[int, Any]:
    """Objects that modules hold as attributes, and the attributes of those objects, by identity."""
    objects: dict[int, Any] = {}
    for module in modules:
        for value in module_attributes(module):
            if id(value) not in objects:
                objects[id(value)] = value
                objects |= {id(inner): inner for inner in getattr(value, "__dict__", {}).values()}
    return objects


def copy_leaf(leaf: object) -> object:
    """A copy of a tensor, as a new leaf of autograd; anything else unchanged.

    For inputs of a model that may write into them.
    """
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
