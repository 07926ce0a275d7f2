"""Flattening and rebuilding of Python containers that hold values.

Containers are lists, tuples (named tuples and torch.Size included), mappings, dataclasses and slices, with their
subclasses. Everything else is a leaf. Nothing here depends on tensors.
"""

import dataclasses
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from penstock.errors import CaptureError


class Parts(NamedTuple):
    """The class of a container, and its items with their keys."""

    kind: type
    keys: tuple[Any, ...]
    items: tuple[Any, ...]


def take_apart(thing: object) -> Parts | None:
    """The parts of a container; None for anything else."""
    kind: Any = type(thing)
    if not _is_container(kind):
        return None
    if isinstance(thing, list | tuple):
        return Parts(type(thing), tuple(range(len(thing))), tuple(thing))
    if isinstance(thing, Mapping):
        return Parts(type(thing), tuple(thing.keys()), tuple(thing.values()))
    if isinstance(thing, slice):
        return Parts(slice, ("start", "stop", "step"), (thing.start, thing.stop, thing.step))
    fields: Any = dataclasses.fields(thing)  # type: ignore[arg-type]
    names = tuple(field.name for field in fields if field.init)
    return Parts(type(thing), names, tuple(getattr(thing, name) for name in names))


@lru_cache(maxsize=4096)
def _is_container(kind: type) -> bool:
    """Cached, because it is called for every leaf of every call."""
    return issubclass(kind, list | tuple | Mapping | slice) or dataclasses.is_dataclass(kind)


def put_together(kind: Any, keys: Sequence[Any], items: Sequence[Any]) -> Any:
    """The container with the given class, keys and items."""
    if kind in (list, tuple, slice):
        return kind(items) if kind is not slice else slice(*items)
    if issubclass(kind, tuple):
        return kind(*items) if hasattr(kind, "_fields") else kind(items)
    if issubclass(kind, list):
        return kind(items)
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


def leaves(thing: object) -> list[object]:
    """All leaves of a structure, left to right."""
    parts = take_apart(thing)
    if parts is None:
        return [thing]
    return [leaf for item in parts.items for leaf in leaves(item)]


def transform(thing: object, change: Callable[[object], Any]) -> Any:
    """The structure with `change` applied to every leaf."""
    parts = take_apart(thing)
    if parts is None:
        return change(thing)
    return put_together(parts.kind, parts.keys, [transform(item, change) for item in parts.items])


def named_leaves(thing: object, name: str) -> list[tuple[str, object]]:
    """All leaves with their paths as names: `batch`, `batch.0`, `batch.0.mask`."""
    parts = take_apart(thing)
    if parts is None:
        return [(name, thing)]
    return [
        found
        for key, item in zip(parts.keys, parts.items, strict=True)
        for found in named_leaves(item, f"{name}.{key}" if name else str(key))
    ]


def named_inputs(
    forward: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    signature: inspect.Signature | None = None,
) -> dict[str, Any]:
    """Every leaf of the arguments of a call, named by the parameters; inspects the signature if it is not given."""
    signature = signature or signature_of(forward)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise _cannot_call(error) from None
    found: list[tuple[str, Any]] = []
    for name, value in bound.arguments.items():
        is_rest = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        found += named_leaves(value, "" if is_rest else name)
    return dict(found)


def signature_of(forward: Callable[..., Any]) -> inspect.Signature:
    """The signature of a callable, or a CaptureError."""
    try:
        return inspect.signature(forward)
    except (TypeError, ValueError) as error:
        raise _cannot_call(error) from None


def _cannot_call(error: Exception) -> CaptureError:
    return CaptureError("the model cannot be called with this batch", reason=error)
