"""JSON documents of the records.

A document is `{"penstock": 1, "type": "Schedule", "value": {...}}`. Reading is strict: no unknown or repeated keys, and
every value has exactly its type (an integer is also accepted for a float). Keys with a default may be left out. Orders
are one text of cells per rank, see text.py; a Series is a list of numbers. Errors give the path of the key, such as
`value.placement.ranks.3`.
"""

import json
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np

from penstock.errors import FormatError, PenstockError
from penstock.ir.batch_split_rules import Ragged, Rows
from penstock.ir.cluster import Cluster, Link, Replicas
from penstock.ir.costs import MessageCost, StageCosts
from penstock.ir.devices import DeviceSpeed
from penstock.ir.graph import Graph, Node, StorageGroup, TensorSpec, Update, Value
from penstock.ir.orders import Orders
from penstock.ir.overhead import MessageCpu, Overhead
from penstock.ir.partition import Crossing, Partition
from penstock.ir.placement import Cuts, Placement
from penstock.ir.plan import Candidate, Choices, DeviceLayout, Plan, Prediction, Search
from penstock.ir.profile import NodeBytes, NodeCost, Profile, SavedTensors
from penstock.ir.run import Run, StepMetrics
from penstock.ir.schedule import Program, Schedule
from penstock.ir.text import write_atomic
from penstock.ir.trace import Curve, Series, Trace
from penstock.ir.training_state import StateBytes, TrainingState

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError
    from pydantic_core import ErrorDetails

VERSION = 1
MAX_JSON_BYTES = 2**30
"""largest document that is read or written"""
RECORDS: dict[str, type] = {
    record.__name__: record
    for record in (
        *(TensorSpec, Value, Node, StorageGroup, Update, Graph),
        *(NodeBytes, SavedTensors, NodeCost, Profile, DeviceSpeed, TrainingState),
        *(Crossing, Partition, Cuts),
        *(MessageCost, StateBytes, StageCosts),
        *(Link, MessageCpu, Overhead, Replicas, Cluster),
        *(Placement, Schedule, Program),
        *(Curve, Trace),
        *(Rows, Ragged),
        *(Choices, Prediction, Candidate, DeviceLayout, Search, Plan),
        *(StepMetrics, Run),
    )
}
"""the records that can be saved, by the type that a document names"""
_UNION_LABELS = ("int", "str", "tuple[int, ...]")
AnyRecord = TypeVar("AnyRecord")


def to_json(record: object) -> str:
    """The document of a record.

    Args:
        record: any record of `penstock.ir`

    Raises:
        FormatError: if reading it would give another record
    """
    name = type(record).__name__
    if RECORDS.get(name) is not type(record):
        raise FormatError("records of this type cannot be saved", type=name)
    try:
        # A line per field of the record, so that two documents can be compared with diff.
        lines = ",\n".join(
            f"  {json.dumps(key)}: {json.dumps(part, allow_nan=False)}" for key, part in _plain(record).items()
        )
    except (TypeError, ValueError) as error:
        raise FormatError("the record cannot be written as JSON", type=name, reason=error) from None
    text = f'{{"penstock": {VERSION}, "type": "{name}", "value": {{\n{lines}\n}}}}\n'
    if from_json(text, type(record)) != record:
        raise FormatError("the record would differ when read back", type=name)
    return text


@overload
def from_json(text: str, record: type[AnyRecord]) -> AnyRecord: ...
@overload
def from_json(text: str, record: None = None) -> Any: ...
def from_json(text: str, record: type | None = None) -> Any:
    """The record of a document.

    Args:
        text: the document
        record: the expected type; None: the type that the document names

    Raises:
        FormatError: if it is not such a document
    """
    if not isinstance(text, str):
        raise FormatError("a document must be a str", got=type(text).__name__, hint="text.decode() if it is bytes")
    if len(text) > MAX_JSON_BYTES:
        raise FormatError("the document is too large", bytes=len(text), limit=MAX_JSON_BYTES)
    # Imported here because it takes longer to import than all of the planning packages.
    from pydantic import ValidationError

    found = _record_type(text)
    if record is not None and found is not record:
        raise FormatError("unexpected type", path="type", type=found.__name__, expected=record.__name__)
    try:
        document: Any = _document_model(found).model_validate_json(text)
    except ValidationError as error:
        raise _format_error(error) from None
    return document.value


def save_record(record: object, path: str | Path) -> None:
    """Write the document of a record atomically.

    Args:
        record: any record of `penstock.ir`
        path: the file to write
    """
    write_atomic(path, to_json(record))


@overload
def load_record(path: str | Path, record: type[AnyRecord]) -> AnyRecord: ...
@overload
def load_record(path: str | Path, record: None = None) -> Any: ...
def load_record(path: str | Path, record: type | None = None) -> Any:
    """Read the record of a file.

    Args:
        path: the file to read
        record: the expected type; None: the type that the document names

    Raises:
        FormatError: if it is not such a document
    """
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read(MAX_JSON_BYTES + 1)
    except (OSError, ValueError) as error:
        raise FormatError("cannot read the file", file=path, reason=error) from None
    try:
        return from_json(text, record)
    except FormatError as error:
        raise FormatError(error.problem, hint=error.hint, **{"file": path, **error.values}) from None


def _plain(value: Any) -> Any:
    """The value as dicts, lists, strings and numbers."""
    if isinstance(value, Orders):
        return [" ".join(map(str, actions)) for actions in value]
    if isinstance(value, Series):
        return value.values.tolist()
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def _record_type(text: str) -> type:
    """The type that a document names; also checks that it is JSON without repeated keys."""
    try:
        tree = json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, column {error.colno}"
        raise FormatError("not JSON", at=at, reason=error.msg) from None
    except RecursionError:
        raise FormatError("the document is nested too deeply") from None
    except FormatError:
        raise
    except ValueError as error:  # a number with too many digits
        raise FormatError("not JSON", reason=error) from None
    if not isinstance(tree, dict) or "penstock" not in tree:
        raise FormatError("not a penstock document", path="penstock", hint="a file that penstock wrote")
    version, name = tree["penstock"], tree.get("type")
    if isinstance(version, int) and version != VERSION:
        hint = "a newer penstock" if version > VERSION else ""
        raise FormatError("unsupported format version", path="penstock", version=version, supported=VERSION, hint=hint)
    if not isinstance(name, str) or name not in RECORDS:
        raise FormatError("unknown record type", path="type", type=repr(name)[:80], hint="a file that penstock wrote")
    return RECORDS[name]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise FormatError("repeated key", key=repr(repeated)[:80])
    return tree


@cache
def _document_model(record: type) -> "type[BaseModel]":
    """A pydantic model of the document; its configuration applies to the nested records as well."""
    from pydantic import ConfigDict, create_model

    config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    return create_model("Document", __config__=config, penstock=(int, ...), type=(str, ...), value=(record, ...))


def _format_error(error: "ValidationError") -> FormatError:
    """The first problem that pydantic found, with its path."""
    first: ErrorDetails = error.errors(include_url=False)[0]
    # The path of a value that may have several types also names the type that was tried.
    path = ".".join(str(key) for key in first["loc"] if key not in _UNION_LABELS)[:200]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, PenstockError):  # raised by the record itself
        return FormatError(cause.problem, hint=cause.hint, **{"path": path, **cause.values})
    if first["type"] == "missing":
        return FormatError("missing key", path=path, hint="a file that penstock wrote")
    if first["type"] == "unexpected_keyword_argument":
        return FormatError("unknown key", path=path)
    problem = first["msg"][:1].lower() + first["msg"][1:]
    return FormatError(problem, path=path, got=repr(first["input"])[:80])
