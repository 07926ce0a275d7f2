"""The codec: any noun to JSON and back, strictly, under a format version.

A document is `{"penstock": 1, "noun": "Schedule", "value": {...}}`. Every key of a noun must be there and no other;
every value must have exactly its type (a whole number also stands for a float). Orders are one text of cells per rank,
in the grammar of `text.py`; Series are lists of numbers. What is refused is refused with the path of its key, such as
`value.placement.ranks[3]`.
"""

import json
import math
import re
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints, overload

import numpy as np

from penstock.errors import FormatError, PenstockError
from penstock.ir import text as cells
from penstock.ir.cluster import Cluster
from penstock.ir.costs import MessageCost, StageCosts, StateBytes
from penstock.ir.cuts import Cuts
from penstock.ir.device_speed import DeviceSpeed
from penstock.ir.files import write_atomic
from penstock.ir.graph import Graph, Node, StorageGroup, TensorSpec, Update, Value
from penstock.ir.links import Link, Replicas
from penstock.ir.orders import MAX_ACTIONS, Orders
from penstock.ir.partition import Crossing, Partition
from penstock.ir.placement import Placement
from penstock.ir.plan import Plan
from penstock.ir.prediction import Prediction
from penstock.ir.profile import NodeBytes, NodeCost, Profile, SavedTensors
from penstock.ir.program import Program
from penstock.ir.run import Run, StepMetrics
from penstock.ir.schedule import Schedule
from penstock.ir.search import Candidate, Choices, Search
from penstock.ir.series import Series
from penstock.ir.trace import Curve, Trace

VERSION = 1
MAX_JSON_BYTES = 2**30
"""of a document"""
MAX_DEPTH = 16
"""of objects and lists in each other; the nouns need 9"""
MAX_LENGTH = MAX_ACTIONS
"""of a list"""
MAX_NAME = 4096
"""characters of a text that is not an order"""
MAX_INT = 2**63 - 1

RECORDS: dict[str, type] = {
    noun.__name__: noun
    for noun in (
        *(TensorSpec, Value, Node, StorageGroup, Update, Graph),
        *(NodeBytes, SavedTensors, NodeCost, Profile, DeviceSpeed),
        *(Crossing, Partition, Cuts),
        *(MessageCost, StateBytes, StageCosts),
        *(Link, Replicas, Cluster),
        *(Placement, Schedule, Program),
        *(Curve, Trace),
        *(Choices, Prediction, Candidate, Search, Plan),
        *(StepMetrics, Run),
    )
}
_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", NoneType: "null"}
_TOKENS = re.compile(r'"[^"\\]*+(?:\\.?[^"\\]*+)*+"?|[\[{]|[\]}]', re.DOTALL)

Noun = TypeVar("Noun")
Where = tuple[str | int, ...]


class _Refused(NamedTuple):
    """Stands in the tree for what JSON can say and a noun cannot; refused where its path is known."""

    problem: str


def to_json(noun: object) -> str:
    """The document of a noun; refused if reading it would not give the same noun."""
    name = type(noun).__name__
    if RECORDS.get(name) is not type(noun):
        raise FormatError("not a noun that can be saved", type=name)
    value = _plain(noun)
    if _decode(value, type(noun), ("value",)) != noun:
        raise FormatError("would not be read back as the same", noun=name)
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(part, allow_nan=False)}" for key, part in value.items())
    text = f'{{"penstock": {VERSION}, "noun": "{name}", "value": {{\n{lines}\n}}}}\n'
    _check_size(len(text))
    return text


@overload
def from_json(text: str, noun: type[Noun]) -> Noun: ...
@overload
def from_json(text: str, noun: None = None) -> Any: ...
def from_json(text: str, noun: type | None = None) -> Any:
    """The noun that a document says; of the given type, or of the type that the document names."""
    if not isinstance(text, str):
        raise FormatError("a document is a text", given=type(text).__name__, hint="text.decode() if it is bytes")
    _check_size(len(text))
    tree = _parse(text)
    if not isinstance(tree, dict) or "penstock" not in tree:
        raise FormatError("not a penstock document", path="penstock", hint="a file that penstock wrote")
    version = _decode(tree["penstock"], int, ("penstock",))
    if version != VERSION:
        hint = "a newer penstock" if version > VERSION else ""
        raise FormatError("another format version", path="penstock", version=version, readable=VERSION, hint=hint)
    _check_keys(tree, ("penstock", "noun", "value"), ())
    name = _decode(tree["noun"], str, ("noun",))
    if name not in RECORDS:
        raise FormatError("no such noun", path="noun", noun=repr(name))
    if noun is not None and RECORDS[name] is not noun:
        raise FormatError("another noun than expected", path="noun", noun=name, expected=noun.__name__)
    return _decode(tree["value"], RECORDS[name], ("value",))


def save_record(noun: object, path: str | Path) -> None:
    """Write the document of a noun; a file that was there before stays whole until the new one is."""
    write_atomic(path, to_json(noun))


@overload
def load_record(path: str | Path, noun: type[Noun]) -> Noun: ...
@overload
def load_record(path: str | Path, noun: None = None) -> Any: ...
def load_record(path: str | Path, noun: type | None = None) -> Any:
    """Read the noun that a file says."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_JSON_BYTES + 1)
    except (OSError, ValueError) as error:
        raise FormatError("cannot read the file", file=path, reason=error) from None
    try:
        return from_json(text, noun)
    except FormatError as error:
        raise FormatError(error.problem, hint=error.hint, **{"file": path, **error.values}) from None


# ------------------------------------------------------------------------------------------------------ noun -> tree


def _plain(value: Any) -> Any:
    """The same as objects, lists, texts and numbers of JSON."""
    if isinstance(value, Orders):
        return [" ".join(map(str, actions)) for actions in value]
    if isinstance(value, Series):
        return value.values.tolist()
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


# ------------------------------------------------------------------------------------------------------ text -> tree


def _check_size(num_bytes: int) -> None:
    if num_bytes > MAX_JSON_BYTES:
        raise FormatError("the document is too large", path="document", bytes=num_bytes, limit=MAX_JSON_BYTES)


def _parse(text: str) -> Any:
    depth = 0
    for token in _TOKENS.finditer(text):
        depth += (token[0] in "[{") - (token[0] in "]}")
        if depth > MAX_DEPTH:
            raise FormatError("nested too deeply", path="document", limit=MAX_DEPTH)
    try:
        return json.loads(text, object_pairs_hook=_object, parse_int=_int, parse_constant=_constant)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise FormatError("not JSON", path="document", place=place, reason=error.msg) from None


def _object(pairs: list[tuple[str, Any]]) -> Any:
    tree = dict(pairs)
    if len(tree) == len(pairs):
        return tree
    names = [name for name, _ in pairs]
    return _Refused(f"a key given twice: {next(name for name in names if names.count(name) > 1)[:MAX_NAME]!r}")


def _int(digits: str) -> Any:
    return int(digits) if len(digits) <= 20 else _Refused("an absurdly large number")


def _constant(name: str) -> Any:
    return _Refused(f"{name} is no number")


# ------------------------------------------------------------------------------------------------------ tree -> noun


def _decode(value: Any, hint: Any, path: Where) -> Any:
    if isinstance(value, _Refused):
        raise FormatError(value.problem, path=_spelled(path))
    if get_origin(hint) is UnionType:
        hint = next((option for option in get_args(hint) if _looks_like(value, option)), hint)
    if hint is Orders:
        return _decode_orders(value, path)
    if hint is Series:
        return _decode_series(value, path)
    if get_origin(hint) is tuple:
        return _decode_tuple(value, get_args(hint), path)
    if is_dataclass(hint):
        return _decode_noun(value, hint, path)
    return _decode_scalar(value, hint, path)


def _looks_like(value: Any, hint: Any) -> bool:
    return type(value) is (get_origin(hint) or hint) or (isinstance(value, list) and get_origin(hint) is tuple)


def _decode_scalar(value: Any, hint: Any, path: Where) -> Any:
    if hint is float and type(value) is int:
        value = float(value)
    if type(value) is not hint:
        raise _wrong_type(value, _spelled_type(hint), path)
    if isinstance(value, str) and len(value) > MAX_NAME:
        raise FormatError("too long a text", path=_spelled(path), characters=len(value), limit=MAX_NAME)
    if isinstance(value, int) and abs(value) > MAX_INT:
        raise FormatError("an absurdly large number", path=_spelled(path), limit=MAX_INT)
    if isinstance(value, float) and not math.isfinite(value):
        raise FormatError("not a finite number", path=_spelled(path), value=value)
    return value


def _decode_tuple(value: Any, items: tuple[Any, ...], path: Where) -> tuple[Any, ...]:
    _check_list(value, path)
    hints = (items[0],) * len(value) if items[1:] == (Ellipsis,) else items
    if len(value) != len(hints):
        raise FormatError("wrong number of items", path=_spelled(path), items=len(value), expected=len(hints))
    return tuple(
        _decode(item, hint, (*path, place)) for place, (item, hint) in enumerate(zip(value, hints, strict=True))
    )


def _decode_series(value: Any, path: Where) -> Series:
    _check_list(value, path)
    if set(map(type, value)) <= {int, float}:
        series = Series(np.asarray(value, dtype=np.float64))
        if np.isfinite(series.values).all():
            return series
    return Series(_decode_tuple(value, (float, ...), path))


def _decode_orders(value: Any, path: Where) -> Orders:
    _check_list(value, path)
    rows = []
    for rank, row in enumerate(value):
        if not isinstance(row, str):
            raise _wrong_type(row, "a text of cells", (*path, rank))
        rows.append(row.split(" ") if row else [])
    try:
        return cells.parse(rows)
    except PenstockError as error:
        number = error.values.get("row")
        raise _placed(error, (*path, number - 1) if isinstance(number, int) else path) from None


def _decode_noun(value: Any, noun: Any, path: Where) -> Any:
    if not isinstance(value, dict):
        raise _wrong_type(value, "an object", path)
    hints = _hints(noun)
    _check_keys(value, tuple(hints), path)
    parts = {name: _decode(value[name], hint, (*path, name)) for name, hint in hints.items()}
    try:
        return noun(**parts)
    except PenstockError as error:
        raise _placed(error, path) from None


@cache
def _hints(noun: Any) -> dict[str, Any]:
    hints = get_type_hints(noun)
    return {field.name: hints[field.name] for field in fields(noun)}


def _check_keys(tree: dict[str, Any], expected: tuple[str, ...], path: Where) -> None:
    for name in expected:
        if name not in tree:
            raise FormatError("a key is missing", path=_spelled((*path, name)))
    for name in tree:
        if name not in expected:
            raise FormatError("an unknown key", path=_spelled((*path, name[:MAX_NAME])), known=", ".join(expected))


def _check_list(value: Any, path: Where) -> None:
    if not isinstance(value, list):
        raise _wrong_type(value, "a list", path)
    if len(value) > MAX_LENGTH:
        raise FormatError("too long a list", path=_spelled(path), items=len(value), limit=MAX_LENGTH)


# ------------------------------------------------------------------------------------------------------------ errors


def _placed(error: PenstockError, path: Where) -> FormatError:
    return FormatError(error.problem, hint=error.hint, **{"path": _spelled(path), **error.values})


def _wrong_type(value: Any, expected: str, path: Where) -> FormatError:
    found = _WORDS.get(type(value), "a list" if isinstance(value, list | tuple) else "an object")
    return FormatError("wrong type", path=_spelled(path), expected=expected, found=found)


def _spelled_type(hint: Any) -> str:
    options = get_args(hint) if get_origin(hint) is UnionType else (hint,)
    return " or ".join(_WORDS.get(option, "a list") for option in options)


def _spelled(path: Where) -> str:
    """`value.placement.ranks[3]`; a key that is no plain name is quoted."""
    parts = []
    for part in path:
        if isinstance(part, int):
            parts.append(f"[{part}]")
        else:
            parts.append(f".{part}" if part.isidentifier() else f"[{part!r}]")
    return "".join(parts).removeprefix(".")
