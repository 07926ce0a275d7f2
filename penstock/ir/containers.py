"""Flattening and rebuilding of Python containers that hold values.

Containers are lists, tuples (named tuples and torch.Size included), mappings, dataclasses and slices, with their
subclasses, and classes that were registered. Everything else is a leaf. Nothing here depends on tensors.
"""

import dataclasses
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from enum import EnumType
from functools import lru_cache
from types import FunctionType, MemberDescriptorType, SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from penstock.errors import CaptureError


class Parts(NamedTuple):
    """The class of a container, and its items with their keys."""

    kind: type
    keys: tuple[Any, ...]
    items: tuple[Any, ...]


def flatten_one_level(thing: object) -> Parts | None:
    """The class, keys and items of a container, which may be containers themselves; None for anything else."""
    kind: Any = type(thing)
    if not _is_container(kind):
        return None
    if isinstance(thing, list | tuple):
        return Parts(type(thing), tuple(range(len(thing))), tuple(thing))
    if isinstance(thing, Mapping):
        return Parts(type(thing), tuple(thing.keys()), tuple(thing.values()))
    if isinstance(thing, slice):
        return Parts(slice, ("start", "stop", "step"), (thing.start, thing.stop, thing.step))
    if kind in _registered:
        return _registered[kind].flatten(thing)
    fields: Any = dataclasses.fields(thing)  # type: ignore[arg-type]
    names = tuple(field.name for field in fields if field.init)
    return Parts(type(thing), names, tuple(getattr(thing, name) for name in names))


@lru_cache(maxsize=4096)
def _is_container(kind: type) -> bool:
    """Cached, because it is called for every leaf of every call."""
    is_known = issubclass(kind, list | tuple | Mapping | slice) or kind in _registered
    return is_known or dataclasses.is_dataclass(kind)


def unflatten_one_level(kind: Any, keys: Sequence[Any], items: Sequence[Any]) -> Any:
    """The container with the given class, keys and items."""
    if kind in (list, tuple, slice):
        return kind(items) if kind is not slice else slice(*items)
    if issubclass(kind, tuple):
        return kind(*items) if hasattr(kind, "_fields") else kind(items)
    if issubclass(kind, list):
        return kind(items)
    if kind in _registered:
        return _registered[kind].unflatten(keys, items)
    content = dict(zip(keys, items, strict=True))
    if hasattr(kind, "__dataclass_fields__"):
        if kind.__dataclass_params__.init:
            return kind(**content)
        # The class has no constructor for its fields.
        made: Any = object.__new__(kind)
        for name, item in content.items():
            object.__setattr__(made, name, item)
        return made
    if issubclass(kind, defaultdict):
        return defaultdict(None, content)
    return kind(content)


def copy_into(target: Any, source: Any) -> Any:
    """Change a container, and those inside it, to hold the items of another one.

    Returns what belongs in the place of `target`: itself, or the source where it cannot be changed.
    """
    old, new = flatten_one_level(target), flatten_one_level(source)
    if old is None or new is None or old.kind is not new.kind:
        return source
    held = dict(zip(old.keys, old.items, strict=True))
    items = [copy_into(held[key], item) if key in held else item for key, item in zip(new.keys, new.items, strict=True)]
    if isinstance(target, list):
        target[:] = items
    elif isinstance(target, MutableMapping):
        target.clear()
        target.update(zip(new.keys, items, strict=True))
    elif is_attributes_only(new.kind) and not isinstance(target, tuple):
        for name, item in zip(new.keys, items, strict=True):
            object.__setattr__(target, name, item)
    else:
        return unflatten_one_level(new.kind, new.keys, items)
    return target


# Other classes


class _Registered(NamedTuple):
    flatten: Callable[[Any], Parts]
    unflatten: Callable[[Sequence[Any], Sequence[Any]], Any]


_registered: dict[type, _Registered] = {}


def register_container(
    kind: type, flatten: Callable[[Any], Parts], unflatten: Callable[[Sequence[Any], Sequence[Any]], Any]
) -> None:
    """Treat the instances of a class, not of its subclasses, as containers from now on."""
    _registered[kind] = _Registered(flatten, unflatten)
    _is_container.cache_clear()


def register_attributes(kind: Any) -> None:
    """Treat the instances of a class for which `is_attributes_only` holds as containers of their attributes."""

    def made(names: Sequence[Any], items: Sequence[Any]) -> Any:
        thing = kind.__new__(kind)
        for name, item in zip(names, items, strict=True):
            object.__setattr__(thing, name, item)
        return thing

    register_container(kind, attributes_of, made)


def attributes_of(thing: object) -> Parts:
    """The attributes of an object, in slots and in its dict."""
    kind: Any = type(thing)
    found = {name: getattr(thing, name) for name in _slots(kind) if hasattr(thing, name)}
    found |= getattr(thing, "__dict__", {})
    return Parts(kind, tuple(found), tuple(found.values()))


@lru_cache(maxsize=4096)
def is_attributes_only(kind: Any) -> bool:
    """Whether an object of this class can be made again from its attributes, as far as the class shows."""
    # A class with a base written in C may keep state there, and functions and open files are more than attributes.
    is_python = kind.__new__ in (object.__new__, SimpleNamespace.__new__) and kind is not object
    methods = {name for base in kind.__mro__ for name in vars(base)}
    return is_python and not isinstance(kind, EnumType) and methods.isdisjoint(("__call__", "__del__", "__next__"))


def num_registered() -> int:
    """How many classes have been registered."""
    return len(_registered)


@lru_cache(maxsize=4096)
def _slots(kind: type) -> tuple[str, ...]:
    members = ((name, found) for base in kind.__mro__ for name, found in vars(base).items())
    return tuple(name for name, found in members if isinstance(found, MemberDescriptorType) and name != "__dict__")


# Structures


def leaves(thing: object) -> list[object]:
    """All leaves of a structure, left to right."""
    found: list[object] = []
    _add_leaves(thing, found)
    return found


def _add_leaves(thing: object, found: list[object]) -> None:
    # Not by way of `Parts` for leaves, lists and tuples, which nearly all things are: this runs several times for every
    # call of a model that is recorded.
    kind: Any = type(thing)
    if not _is_container(kind):
        found.append(thing)
        return
    items = thing if isinstance(thing, list | tuple) else flatten_one_level(thing).items  # type: ignore[union-attr]
    for item in items:
        _add_leaves(item, found)


def map_leaves(thing: object, change: Callable[[object], Any]) -> Any:
    """The structure with `change` applied to every leaf."""
    parts = flatten_one_level(thing)
    if parts is None:
        return change(thing)
    return unflatten_one_level(parts.kind, parts.keys, [map_leaves(item, change) for item in parts.items])


def named_leaves(thing: object, name: str) -> list[tuple[str, object]]:
    """All leaves with their paths as names: `batch`, `batch.0`, `batch.0.mask`."""
    parts = flatten_one_level(thing)
    if parts is None:
        return [(name, thing)]
    return [
        found
        for key, item in zip(parts.keys, parts.items, strict=True)
        for found in named_leaves(item, f"{name}.{key}" if name else str(key))
    ]


def named_arguments(
    forward: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    signature: inspect.Signature | None = None,
) -> dict[str, Any]:
    """The arguments of a call in the order of the signature, so that those given by position come first.

    Each is named by its parameter, those of `*args` by their positions too: `args.0`. Inspects the signature if it is
    not given.
    """
    signature = signature or signature_of(forward)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise _cannot_call(error, signature, len(args)) from None
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            named.update((f"{name}.{position}", item) for position, item in enumerate(value))
        elif kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        else:
            named[name] = value
    return named


def named_inputs(
    forward: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    signature: inspect.Signature | None = None,
) -> dict[str, Any]:
    """Every leaf of the arguments of a call, named like them and by its path: `batch.mask`."""
    arguments = named_arguments(forward, args, kwargs, signature)
    return dict([leaf for name, value in arguments.items() for leaf in named_leaves(value, name)])


_signatures: "WeakKeyDictionary[object, inspect.Signature]" = WeakKeyDictionary()
"""of methods without `self`, by function: every step needs that of the model's forward"""


def signature_of(forward: Callable[..., Any]) -> inspect.Signature:
    """The signature of a callable, or a CaptureError."""
    function = getattr(forward, "__func__", None)
    signature = None if function is None else _signatures.get(function)
    if signature is None:
        try:
            signature = inspect.signature(forward)
        except (TypeError, ValueError) as error:
            raise _cannot_call(error) from None
        if isinstance(function, FunctionType) and not vars(function):  # no __wrapped__ or __signature__
            _signatures[function] = signature
    return signature


def _cannot_call(error: Exception, signature: inspect.Signature | None = None, num_args: int = 0) -> CaptureError:
    hint = ""
    if signature is not None:
        hint = f"the arguments of the model's forward: ({', '.join(signature.parameters)})"
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        if num_args > sum(parameter.kind in kinds for parameter in signature.parameters.values()):
            hint += "; a target of the loss function is given by name: pipe.step(x, target=y)"
    return CaptureError("the model cannot be called with this batch", reason=error, hint=hint)
