"""Values: numbers, texts, lists, dicts and tensors as JSON, with the tensors beside it by name."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.errors import CheckpointError, DamagedError

_PLAIN = (type(None), bool, int, str)
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

Tensors = dict[str, Tensor]
Find = Callable[[str], Tensor]


def to_plain(value: Any, tensors: Tensors, name: str) -> Any:
    """The value as JSON has it; tensors are put among the others by where they were found."""
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
    if isinstance(value, np.ndarray) and value.dtype != object:
        return _tensor("$array", torch.from_numpy(np.ascontiguousarray(value)), tensors, name)
    if isinstance(value, list | tuple):
        items = [to_plain(item, tensors, f"{name}.{place}") for place, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, dict):
        return _object(value, tensors, name)
    raise CheckpointError(
        "a value is of a kind that a checkpoint cannot hold",
        name=name,
        type=type(value).__name__,
        hint="numbers, texts, lists, dicts, tensors and arrays",
    )


def _tensor(kind: str, tensor: Tensor, tensors: Tensors, name: str) -> dict[str, str]:
    tensors[name] = tensor
    return {kind: name}


def _object(value: dict[Any, Any], tensors: Tensors, name: str) -> Any:
    if isinstance(value, Counter) or not all(type(key) is str and not key.startswith("$") for key in value):
        kind = "$counter" if isinstance(value, Counter) else "$dict"
        pairs = enumerate(value.items())
        return {
            kind: [
                [to_plain(part, tensors, f"{name}.{place}.{n}") for n, part in enumerate(pair)] for place, pair in pairs
            ]
        }
    return {key: to_plain(item, tensors, f"{name}.{key}") for key, item in value.items()}


def from_plain(value: Any, find: Find) -> Any:
    """The value that JSON says; `find` brings a tensor by its name."""
    if isinstance(value, list):
        return [from_plain(item, find) for item in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value), "")
    if kind.startswith("$") and len(value) == 1:
        return _special(kind, value[kind], find)
    return {key: from_plain(item, find) for key, item in value.items()}


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
            return tuple(from_plain(item, find) for item in content)
        case "$dict" | "$counter":
            pairs = {_key(from_plain(key, find)): from_plain(item, find) for key, item in content}
            return Counter(pairs) if kind == "$counter" else pairs
    raise DamagedError("a value of a kind that is not known", kind=kind)


def _key(key: Any) -> Any:
    if isinstance(key, list | dict):
        raise DamagedError("a key that is none", key=repr(key)[:60])
    return key


def names_of(value: Any) -> Iterable[str]:
    """The tensors that a value of JSON names."""
    if isinstance(value, list):
        for item in value:
            yield from names_of(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if key in ("$tensor", "$array") and isinstance(item, str):
                yield item
            else:
                yield from names_of(item)


def to_text(value: Any) -> bytes:
    """A document of JSON."""
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


def from_text(text: bytes, file: object) -> Any:
    """What a document says."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedError("a file is not JSON", file=file, reason=error) from None
