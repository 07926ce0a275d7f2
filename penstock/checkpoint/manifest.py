"""The manifest of a checkpoint: its files with their digests, written last. A directory without it is incomplete.

A new field of `Manifest` needs a default, which is left out of the document, so that manifests without it stay valid;
encoding, decoding and their checks derive from the record, and `_make_manifest` in saving.py gives the field its value.
An older penstock refuses a manifest with a field that it does not know, as written by a newer one. FORMAT grows when
the files have changed in another way.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from penstock.checkpoint.tensor_file import FileRecord, open_regular, read_bytes
from penstock.errors import CheckpointError, DamagedError, PenstockError
from penstock.runtime import json_bytes, parse_json

NAME = "manifest.json"
FORMAT = 1
_MAX_BYTES = 1 << 24  # that of 100,000 tensors; parsing takes 30 times the memory
MAX_STEP = 10**18 - 1
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}(\.[A-Za-z0-9]{1,20})?")
_STEP = re.compile(r"step-(\d{6,18})")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_USE_EARLIER = "an earlier checkpoint: this one has changed since it was written"
_STRICT = {"extra": "forbid", "strict": True}


def step_name(step: int) -> str:
    """Directory name of the checkpoint of a step."""
    return f"step-{step:06d}"


def step_of(path: Path) -> int | None:
    """The step in the name of a checkpoint; None if the name is not that of a checkpoint."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


@dataclass(frozen=True)
class PlanSummary:
    """The main sizes of the plan; the whole plan is in a separate file."""

    __pydantic_config__ = _STRICT

    ranks: int
    processes: int
    """1 if all ranks ran in one process"""
    stages: int
    microbatches: int
    schedule: str


@dataclass(frozen=True)
class TensorRecord:
    """Where a parameter or buffer is, and its dtype (a name in `tensor_file.DTYPES`) and shape."""

    __pydantic_config__ = _STRICT

    file: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """Contents of one checkpoint."""

    __pydantic_config__ = _STRICT

    step: int
    written: str
    """time in UTC"""
    model: str
    """digest of the names, shapes and dtypes of parameters and buffers"""
    plan: PlanSummary
    versions: dict[str, str]
    tied: tuple[tuple[str, ...], ...]
    """groups of names of one parameter, of which the first is in the files"""
    tensors: dict[str, TensorRecord]
    files: dict[str, FileRecord]

    def __post_init__(self) -> None:
        if not 0 <= self.step <= MAX_STEP:
            raise DamagedError("invalid step in the manifest", step=str(self.step)[:60])
        for name, record in self.files.items():
            # Names come from outside: a path could lead to any file of the system.
            if not _FILE_NAME.fullmatch(name) or name == NAME:
                hint = "a checkpoint that penstock wrote, complete and unchanged"
                raise DamagedError("the manifest names a file outside its directory", name=repr(name)[:80], hint=hint)
            if record.bytes < 0 or record.rank < 0 or not _DIGEST.fullmatch(record.sha256):
                raise DamagedError("invalid record of a file in the manifest", name=name)
        if unknown := {record.file for record in self.tensors.values()} - set(self.files):
            raise DamagedError("the manifest names files that it does not list", names=sorted(map(repr, unknown))[:5])

    @property
    def total_bytes(self) -> int:
        """Size of all files together."""
        return sum(record.bytes for record in self.files.values())

    def to_bytes(self) -> bytes:
        """The document, with its own digest."""
        content = document_with_digest(_adapter().dump_python(self, mode="json", exclude_defaults=True))
        if len(content) > _MAX_BYTES:
            problem = "the manifest would be too large to be read: the model has too many tensors"
            raise CheckpointError(problem, bytes=len(content), limit=_MAX_BYTES, tensors=len(self.tensors))
        return content


def document_with_digest(content: Mapping[str, Any]) -> bytes:
    """The document of a manifest's fields, with a digest of them, which shows damage of the manifest itself."""
    digest = hashlib.sha256(json_bytes(content)).hexdigest()
    return json_bytes({"penstock_checkpoint": FORMAT, "manifest": content, "sha256": digest})


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of a directory; refused if a single byte has changed since it was written."""
    path = directory / NAME
    text = read_bytes(path, _MAX_BYTES)
    document = parse_json(text, path)
    if not isinstance(document, dict):
        raise DamagedError("the manifest is not a JSON object", file=path)
    version = document.get("penstock_checkpoint")
    if type(version) is int and version > FORMAT:
        raise CheckpointError(
            "the checkpoint has a newer format", file=path, format=version, readable=FORMAT, hint="a newer penstock"
        )
    manifest = _decode(document.get("manifest"), text, path)
    try:
        # The whole text is compared, not only the digest: a manifest has exactly one valid encoding.
        is_unchanged = manifest.to_bytes() == text
    except PenstockError as error:
        raise DamagedError("the manifest cannot be read", file=path, reason=error) from None
    if not is_unchanged:
        raise DamagedError("the manifest has changed since it was written", file=path)
    return manifest


@cache
def _adapter() -> Any:
    from pydantic import TypeAdapter  # takes a while, and is needed only where checkpoints are read or written

    return TypeAdapter(Manifest)


def _decode(content: Any, text: bytes, path: Path) -> Manifest:
    """The manifest of a document; `text` is the whole document."""
    from pydantic import ValidationError

    try:
        # Via JSON, so that lists are accepted as tuples although the types are strict.
        return _adapter().validate_json(json_bytes(content))
    except ValidationError as error:
        first = error.errors()[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, DamagedError):  # of __post_init__
            raise DamagedError(cause.problem, file=path, hint=cause.hint, **cause.values) from None
        key = ".".join(map(str, first["loc"]))[:200]
        has_unknown_fields = all(each["type"] == "unexpected_keyword_argument" for each in error.errors())
        # Damage would have changed the digest.
        if has_unknown_fields and document_with_digest(content) == text:
            raise CheckpointError(
                "the checkpoint was written by a newer penstock", file=path, unknown=key, hint="a newer penstock"
            ) from None
        raise DamagedError("the manifest cannot be read", file=path, key=key, reason=first["msg"]) from None


def fingerprint(tensors: Mapping[str, TensorRecord], tied: tuple[tuple[str, ...], ...]) -> str:
    """A digest of a model's names, dtypes and shapes."""
    names = [[name, record.dtype, list(record.shape)] for name, record in sorted(tensors.items())]
    return hashlib.sha256(json_bytes([names, sorted(map(list, tied))])).hexdigest()


def check_sizes(directory: Path, manifest: Manifest) -> None:
    """Refuse files that are missing, are links, or have another size; their content is not read."""
    for name, record in manifest.files.items():
        descriptor = open_regular(directory / name)
        size = os.fstat(descriptor).st_size
        os.close(descriptor)
        if size != record.bytes:
            raise DamagedError(
                "the size of a file has changed since it was written",
                file=directory / name,
                bytes=size,
                written=record.bytes,
                hint=_USE_EARLIER,
            )


def check_digests(directory: Path, manifest: Manifest, names: Iterable[str]) -> int:
    """Refuse files whose content has changed; returns the number of bytes that were read."""
    total = 0
    for name in names:
        try:
            with os.fdopen(open_regular(directory / name), "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise DamagedError("cannot read a file", file=directory / name, reason=error.strerror) from None
        if digest != manifest.files[name].sha256:
            raise DamagedError("a file has changed since it was written", file=directory / name, hint=_USE_EARLIER)
        total += manifest.files[name].bytes
    return total


def files_to_check(manifest: Manifest, rank: int, ranks: int) -> list[str]:
    """One rank's share of the files when several ranks verify a checkpoint: its own files, or an even part."""
    if manifest.plan.processes == ranks:
        return [name for name, record in manifest.files.items() if record.rank % ranks == rank]
    # Another number of ranks: the largest file first, each to the rank that has the fewest bytes so far.
    loads = [0] * ranks
    names = []
    for name in sorted(manifest.files, key=lambda name: (-manifest.files[name].bytes, name)):
        least = loads.index(min(loads))
        loads[least] += manifest.files[name].bytes
        names += [name] if least == rank else []
    return names
