"""Reads and writes files of a checkpoint: tensors as safetensors, hashed while written and synced to disk."""

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.capture import as_bytes, from_real_entries, real_entries
from penstock.errors import CheckpointError, DamagedError

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "C128": torch.complex128,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""dtypes by their names in the format, which lacks complex128: files hold pairs of float64 instead"""
_COMPLEX128 = "complex128"
"""key in the metadata of a file: the names of the complex128 tensors, as a JSON list"""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 8
_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class FileRecord:
    """Size and digest by which a file is verified."""

    __pydantic_config__ = {"extra": "forbid", "strict": True}  # noqa: RUF012

    bytes: int
    sha256: str
    rank: int
    """that wrote it"""


def dtype_and_shape(tensor: Tensor, name: str) -> tuple[str, tuple[int, ...]]:
    """Name of the dtype in the format, and shape; refused if the format does not have the dtype."""
    if tensor.dtype not in _NAMES:
        hint = "a buffer of another dtype, or one registered with persistent=False"
        raise CheckpointError("safetensors files cannot hold this dtype", name=name, dtype=tensor.dtype, hint=hint)
    return _NAMES[tensor.dtype], tuple(tensor.shape)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], rank: int = 0) -> FileRecord:
    """Write a new safetensors file; tensors are copied to host memory one after the other."""
    complex_names = sorted(name for name, tensor in tensors.items() if tensor.dtype == torch.complex128)
    tensors = {**tensors, **{name: real_entries(tensors[name]) for name in complex_names}}
    # The largest element sizes first, so that every tensor is aligned to its own.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": {_COMPLEX128: json.dumps(complex_names)}} if complex_names else {}
    end = 0
    for name in order:
        dtype, shape = dtype_and_shape(tensors[name], name)
        begin, end = end, end + tensors[name].numel() * tensors[name].element_size()
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    # The format: the length of the header in 8 bytes, the header as JSON, padded with spaces, and the data.
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    return write_bytes(path, (head, *(tensors[name] for name in order)), rank)


class TensorFile:
    """The tensors of an open safetensors file, with those that `write_tensors` wrote as pairs in their own dtype."""

    def __init__(self, opened: Any) -> None:
        """`opened` is what `safetensors.safe_open` returned."""
        self._opened = opened
        self.names = frozenset(opened.keys())
        self._complex_names = frozenset(json.loads((opened.metadata() or {}).get(_COMPLEX128, "[]")))

    def dtype_and_shape(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Name of the dtype and shape of a tensor, as `dtype_and_shape` returned them when it was written."""
        view = self._opened.get_slice(name)
        dtype, shape = view.get_dtype(), tuple(view.get_shape())
        is_complex = name in self._complex_names and dtype == "F64" and shape[-1:] == (2,)
        return ("C128", shape[:-1]) if is_complex else (dtype, shape)

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """A tensor, or some of its rows."""
        tensor = self._opened.get_tensor(name) if rows is None else self._opened.get_slice(name)[rows]
        return from_real_entries(tensor, torch.complex128) if name in self._complex_names else tensor


def write_bytes(path: Path, parts: Iterable[bytes | Tensor], rank: int = 0) -> FileRecord:
    """Write a new file that only its owner can read, and wait until it is on disk."""
    digest, size = hashlib.sha256(), 0
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb", 0) as file:
        for part in parts:
            for chunk in _chunks(part):
                digest.update(chunk)
                size += len(chunk)
                while chunk:  # a write may be partial
                    chunk = chunk[os.write(file.fileno(), chunk) :]
        os.fsync(file.fileno())
    return FileRecord(size, digest.hexdigest(), rank)


def _chunks(part: bytes | Tensor) -> Iterator[memoryview]:
    if isinstance(part, Tensor):
        content = memoryview(as_bytes(part.detach().cpu()).numpy().data)
    else:
        content = memoryview(part)
    for start in range(0, len(content), _CHUNK_BYTES):
        yield content[start : start + _CHUNK_BYTES]


def open_regular(path: Path) -> int:
    """Open a file of a checkpoint for reading; links and anything but regular files are refused."""
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise DamagedError("a file is missing", file=path) from None
    except OSError as error:
        problem = "a file is a symbolic link, which could lead anywhere" if path.is_symlink() else "cannot read a file"
        raise DamagedError(problem, file=path, reason=error.strerror) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DamagedError("not a regular file", file=path)
    return descriptor


def read_bytes(path: Path, limit: int) -> bytes:
    """The content of a file of a checkpoint, refused if it is larger than `limit`."""
    with os.fdopen(open_regular(path), "rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise DamagedError("a file is too large", file=path, limit=limit)
    return content
