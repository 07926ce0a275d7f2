"""Tensors file: named tensors written in the format of safetensors, hashed on the way, and on disk when it is done."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from penstock.checkpoint.reading import DTYPES
from penstock.errors import CheckpointError

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 8
_CHUNK = 1 << 24
"""bytes handed to the system at a time"""


@dataclass(frozen=True)
class FileRecord:
    """What a file is known again by."""

    bytes: int
    sha256: str
    rank: int = 0
    """who wrote it"""


def form_of(tensor: Tensor, name: str) -> tuple[str, list[int]]:
    """The type and the shape of a tensor, as the format names them."""
    if tensor.dtype not in _NAMES:
        raise CheckpointError("no file of safetensors holds numbers of this type", name=name, type=tensor.dtype)
    return _NAMES[tensor.dtype], list(tensor.shape)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], rank: int = 0) -> FileRecord:
    """Write a new file; tensors come to host memory one after the other."""
    # The largest numbers first, so that each lies at a multiple of its size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {}
    end = 0
    for name in order:
        kind, shape = form_of(tensors[name], name)
        begin, end = end, end + tensors[name].numel() * tensors[name].element_size()
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    return write_bytes(path, (head, *(tensors[name] for name in order)), rank)


def write_bytes(path: Path, parts: Iterable[bytes | Tensor], rank: int = 0) -> FileRecord:
    """Write a new file that only its owner can read, and wait until the disk has it."""
    digest, size = hashlib.sha256(), 0
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb", 0) as file:
        for part in parts:
            for piece in _pieces(part):
                digest.update(piece)
                _write(file.fileno(), piece)
                size += len(piece)
        os.fsync(file.fileno())
    return FileRecord(size, digest.hexdigest(), rank)


def _pieces(part: bytes | Tensor) -> Iterator[memoryview]:
    whole = memoryview(part) if isinstance(part, bytes) else memoryview(_plain(part).numpy().data)
    for start in range(0, len(whole), _CHUNK):
        yield whole[start : start + _CHUNK]


def _plain(tensor: Tensor) -> Tensor:
    """The numbers as bytes in host memory, in their order."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _write(number: int, piece: memoryview) -> None:
    while piece:
        piece = piece[os.write(number, piece) :]
