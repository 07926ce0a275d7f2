"""Values: numbers, texts, lists, dicts and tensors as JSON, with the tensors beside it by name."""

import json
import math
from collections import Counter
from collections.abc import Callable
from itertools import chain, count
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.errors import CheckpointError, DamagedError

_PLAIN = (type(None), bool, int, str)
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

Tensors = dict[str, Tensor]
Find = Callable[[str], Tensor]


def to_plain(value: Any, tensors: Tensors, name: str) -> Any:
    """The value as JSON has it; tensors are put among the others by where they were found."""
    try:
        return _plain(value, tensors, name)
    except RecursionError:
        raise CheckpointError("a value holds itself, or is too deep for a checkpoint", name=name) from None


def _plain(value: Any, tensors: Tensors, name: str) -> Any:
    if isinstance(value, Tensor):
        return _tensor("$tensor", value.detach(), tensors, name)
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) in _PLAIN:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, np.ndarray) and (array := _array(value)) is not None:
        return _tensor("$array", array, tensors, name)
    if isinstance(value, list | tuple):
        items = [_plain(item, tensors, f"{name}.{place}") for place, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, dict):
        return _object(value, tensors, name)
    raise CheckpointError(
        "a value is of a kind that a checkpoint cannot hold",
        name=name,
        type=type(value).__name__,
        hint="numbers, texts, lists, dicts, tensors and arrays",
    )


def _array(value: NDArray[Any]) -> Tensor | None:
    """The array as a tensor; None if it does not hold numbers that torch knows."""
    try:
        native = value.astype(value.dtype.newbyteorder("="))
        return torch.from_numpy(np.ascontiguousarray(native)).reshape(value.shape)
    except TypeError:
        return None


def _tensor(kind: str, tensor: Tensor, tensors: Tensors, name: str) -> dict[str, str]:
    # Keys may have dots, so that two places have one name.
    free = next(own for own in chain((name,), (f"{name}#{number}" for number in count(2))) if own not in tensors)
    tensors[free] = tensor
    return {kind: free}


def _object(value: dict[Any, Any], tensors: Tensors, name: str) -> Any:
    if isinstance(value, Counter) or not all(type(key) is str and not key.startswith("$") for key in value):
        kind = "$counter" if isinstance(value, Counter) else "$dict"
        pairs = enumerate(value.items())
        return {
            kind: [
                [_plain(part, tensors, f"{name}.{place}.{n}") for n, part in enumerate(pair)] for place, pair in pairs
            ]
        }
    return {key: _plain(item, tensors, f"{name}.{key}") for key, item in value.items()}


def from_plain(value: Any, find: Find) -> Any:
    """The value that JSON says; `find` brings a tensor by its name."""
    try:
        return _value(value, find)
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise DamagedError("a value cannot be read", reason=error) from None


def _value(value: Any, find: Find) -> Any:
    if isinstance(value, list):
        return [_value(item, find) for item in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value), "")
    if kind.startswith("$") and len(value) == 1:
        return _special(kind, value[kind], find)
    return {key: _value(item, find) for key, item in value.items()}


def _special(kind: str, content: Any, find: Find) -> Any:
    match kind:
        case "$tensor":
            return find(content)
        case "$array":
            return find(content).numpy()
        case "$float" if content in _FLOATS:
            return _FLOATS[content]
        case "$dtype" if isinstance(vars(torch).get(content), torch.dtype):
            return vars(torch)[content]
        case "$tuple":
            return tuple(_value(item, find) for item in content)
        case "$dict" | "$counter":
            pairs = {_key(_value(key, find)): _value(item, find) for key, item in content}
            return Counter(pairs) if kind == "$counter" else pairs
    raise DamagedError("a value of a kind that is not known", kind=kind)


def _key(key: Any) -> Any:
    if isinstance(key, list | dict):
        raise DamagedError("a key that is none", key=repr(key)[:60])
    return key


def to_text(value: Any) -> bytes:
    """A document of JSON."""
    try:
        return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()
    except ValueError as error:
        raise CheckpointError("a value cannot be written", reason=error) from None


def from_text(text: bytes, file: object) -> Any:
    """What a document says."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedError("a file is not JSON", file=file, reason=error) from None
