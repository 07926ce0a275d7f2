"""Encodes nested Python values as JSON and a dict of their tensors, for checkpoints and messages between ranks.

Nothing is pickled, so that reading a file or a message never runs code.
Values that JSON lacks are objects with one key that begins with `$`: `{"$tensor": name}`, `{"$tuple": [...]}`.
"""

import json
import math
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import chain, count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.capture import dtype_name
from penstock.errors import CheckpointError, DamagedError

_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

NamedTensors = dict[str, Tensor]
FindTensor = Callable[[str], Tensor]


def encode_tree(value: Any, tensors: NamedTensors, name: str) -> Any:
    """Return the value in types that JSON has, and add its tensors to `tensors`.

    A tensor is named by its position in the value: `name`, `name.0`, `name.key`.
    """
    try:
        return _encode(value, tensors, name)
    except RecursionError:
        raise CheckpointError("a value contains itself, or is nested too deeply", name=name) from None


def _encode(value: Any, tensors: NamedTensors, name: str) -> Any:
    if isinstance(value, Tensor):
        return _encode_tensor("$tensor", value, tensors, name)
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, torch.dtype):
        return {"$dtype": dtype_name(value)}
    if isinstance(value, np.ndarray):
        # An array of a dtype that torch lacks is refused below.
        with suppress(TypeError):
            native = np.ascontiguousarray(value.astype(value.dtype.newbyteorder("=")))
            return _encode_tensor("$array", torch.from_numpy(native).reshape(value.shape), tensors, name)
    if isinstance(value, list | tuple):
        items = [_encode(item, tensors, f"{name}.{index}") for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, dict):
        if not isinstance(value, Counter) and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _encode(item, tensors, f"{name}.{key}") for key, item in value.items()}
        pairs = [
            [_encode(part, tensors, f"{name}.{index}.{position}") for position, part in enumerate(pair)]
            for index, pair in enumerate(value.items())
        ]
        return {"$counter" if isinstance(value, Counter) else "$dict": pairs}
    raise CheckpointError(
        "a checkpoint cannot hold a value of this type",
        name=name,
        type=type(value).__name__,
        hint="numbers, strings, lists, tuples, dicts, tensors and arrays",
    )


def _encode_tensor(kind: str, tensor: Tensor, tensors: NamedTensors, name: str) -> dict[str, str]:
    # Keys may contain dots, so two positions can have the same name.
    candidates = chain((name,), (f"{name}#{number}" for number in count(2)))
    unused = next(candidate for candidate in candidates if candidate not in tensors)
    tensors[unused] = tensor
    return {kind: unused}


def decode_tree(value: Any, find: FindTensor) -> Any:
    """The value that `encode_tree` was given; `find` returns a tensor by its name."""
    try:
        return _decode(value, find)
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise DamagedError("a value cannot be read", reason=error) from None


def _decode(value: Any, find: FindTensor) -> Any:
    if isinstance(value, list):
        return [_decode(item, find) for item in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value), "")
    if not (kind.startswith("$") and len(value) == 1):
        return {key: _decode(item, find) for key, item in value.items()}
    content = value[kind]
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
            return tuple(_decode(item, find) for item in content)
        case "$dict" | "$counter":
            pairs = [(_decode(key, find), _decode(item, find)) for key, item in content]
            if unhashable := [key for key, _ in pairs if isinstance(key, list | dict)]:
                raise DamagedError("invalid dictionary key", key=repr(unhashable[0])[:60])
            return Counter(dict(pairs)) if kind == "$counter" else dict(pairs)
    raise DamagedError("unknown kind of value", kind=kind)


def json_bytes(value: Any) -> bytes:
    """A JSON document."""
    try:
        return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()
    except ValueError as error:
        raise CheckpointError("a value cannot be written as JSON", reason=error) from None


def parse_json(text: bytes, file: object) -> Any:
    """The content of a JSON document."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedError("a file is not valid JSON", file=file, reason=error) from None
