"""Manifest: what a checkpoint consists of, written last; without it, or with a letter changed, there is none."""

import hashlib
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.checkpoint.tensors_file import FileRecord
from penstock.checkpoint.values import from_text, to_text
from penstock.errors import CheckpointError, DamagedError

NAME = "manifest.json"
FORMAT = 1
_LARGEST = 1 << 28
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*(\.[A-Za-z0-9]+)?")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_KEYS = ("penstock_checkpoint", "step", "written", "model", "plan", "versions", "tied", "tensors", "files")
_PLAN = {"ranks": int, "processes": int, "stages": int, "microbatches": int, "schedule": str}
_LARGEST_STEP = 10**18 - 1


@dataclass(frozen=True)
class Manifest:
    """One checkpoint, in words and figures."""

    step: int
    written: str
    """when, in universal time"""
    model: str
    """a digest of the names, shapes and types of its parameters and buffers"""
    plan: Mapping[str, Any]
    """ranks, stages, microbatches and schedule of the plan that it was trained by, which is in a file of its own"""
    versions: Mapping[str, str]
    tied: tuple[tuple[str, ...], ...]
    """names that are one parameter, of which the first is in the files"""
    tensors: Mapping[str, tuple[str, str, tuple[int, ...]]]
    """for every parameter and buffer its file, type and shape"""
    files: Mapping[str, FileRecord]

    @property
    def total_bytes(self) -> int:
        """Of all files together."""
        return sum(record.bytes for record in self.files.values())

    def text(self) -> bytes:
        """The document, with its own digest at the end."""
        content = {
            "penstock_checkpoint": FORMAT,
            "step": self.step,
            "written": self.written,
            "model": self.model,
            "plan": dict(self.plan),
            "versions": dict(self.versions),
            "tied": [list(group) for group in self.tied],
            "tensors": {name: [file, kind, list(shape)] for name, (file, kind, shape) in self.tensors.items()},
            "files": {name: asdict(record) for name, record in self.files.items()},
        }
        return to_text({**content, "sha256": hashlib.sha256(to_text(content)).hexdigest()})


def fingerprint(forms: Mapping[str, tuple[str, Any]], tied: tuple[tuple[str, ...], ...]) -> str:
    """A digest of a model's names, types and shapes."""
    plain = [[name, kind, list(shape)] for name, (kind, shape) in sorted(forms.items())]
    return hashlib.sha256(to_text([plain, sorted(map(list, tied))])).hexdigest()


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a directory; refused if it is not just what was written, or leads elsewhere."""
    path = directory / NAME
    text = read_plain(path, _LARGEST)
    content = from_text(text, path)
    if not isinstance(content, dict):
        raise DamagedError("the manifest is no object", file=path)
    version = content.get("penstock_checkpoint")
    if type(version) is int and version > FORMAT:
        raise CheckpointError(
            "the checkpoint is of a newer format", file=path, format=version, readable=FORMAT, hint="a newer penstock"
        )
    try:
        manifest = _decoded(content)
        same = manifest.text() == text
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise DamagedError(error.problem, hint=error.hint, **{"file": path, **error.values}) from None
        raise DamagedError("the manifest does not say what it should", file=path, reason=repr(error)) from None
    if not same:
        raise DamagedError("the manifest was changed after it was written", file=path)
    return manifest


def _decoded(content: dict[str, Any]) -> Manifest:
    if set(content) != {*_KEYS, "sha256"}:
        raise DamagedError("the manifest has other keys than it should", keys=", ".join(sorted(content))[:200])
    files = {_plain_name(name): FileRecord(**record) for name, record in content["files"].items()}
    for name, record in files.items():
        numbers = (record.bytes, record.rank)
        if any(type(number) is not int or number < 0 for number in numbers) or not _DIGEST.fullmatch(record.sha256):
            raise DamagedError("the manifest does not know a file", name=name)
    tensors = {name: (file, kind, tuple(shape)) for name, (file, kind, shape) in content["tensors"].items()}
    if strange := {file for file, _, _ in tensors.values()} - set(files):
        raise DamagedError("the manifest names files that it does not list", names=sorted(map(repr, strange))[:5])
    if type(content["step"]) is not int or not 0 <= content["step"] <= _LARGEST_STEP:
        raise DamagedError("the manifest has no step", step=repr(content["step"])[:60])
    if {name: type(value) for name, value in content["plan"].items()} != _PLAN:
        raise DamagedError("the manifest does not know its plan", plan=repr(content["plan"])[:200])
    return Manifest(
        content["step"],
        str(content["written"]),
        str(content["model"]),
        content["plan"],
        content["versions"],
        tuple(map(tuple, content["tied"])),
        tensors,
        files,
    )


def _plain_name(name: object) -> str:
    if not isinstance(name, str) or not _PLAIN_NAME.fullmatch(name) or name == NAME:
        raise DamagedError(
            "the manifest names something that is no plain file beside it",
            names=repr(name)[:80],
            hint="a checkpoint that penstock wrote, whole and unchanged",
        )
    return name


def opened(path: Path) -> int:
    """A file of a checkpoint for reading; links and what is no file are refused."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise DamagedError("a file is missing", file=path) from None
    except OSError as error:
        problem = "a file is a link, and could lead anywhere" if path.is_symlink() else "a file cannot be read"
        raise DamagedError(problem, file=path, reason=error.strerror) from None
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise DamagedError("what should be a file is none", file=path)
    return number


def read_plain(path: Path, largest: int) -> bytes:
    """All bytes of a file of a checkpoint."""
    with os.fdopen(opened(path), "rb") as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise DamagedError("a file is too large", file=path, limit=largest)
    return content
