"""Reading: the tensors that a rank asks for, and how many bytes that took."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.checkpoint.names import listed
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
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class Loaded:
    """What one rank has read."""

    num_tensors: int
    bytes_read: int
    files: tuple[str, ...]
    """those that were opened"""
    path: str = ""
    """the directory that was read, where there were several"""
    step: int | None = None
    """how many steps had been taken; None where that was not saved"""
    position: Any = None
    """where in the data training stood, as it was given to `save`"""
    extra: Any = None
    """whatever else was given to `save`"""
    bytes_checked: int = 0
    """of files that this rank compared with their digests, for all ranks"""


class Reader:
    """The tensors of a checkpoint by their names in it; a file is opened only for what it has."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = dict(files)

    @property
    def names(self) -> tuple[str, ...]:
        """All that the checkpoint has, as it says."""
        return tuple(self._files)

    def read(
        self, places: Mapping[str, Sequence[str]], wanted: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], Loaded]:
        """Numbers for every wanted name, which must have the form of the tensor given for it, and what was read.

        `places` says by which names each is in the checkpoint. Nothing is read unless all forms are right.
        """
        with ExitStack() as stack:
            opened: dict[Path, Any] = {}
            for name in wanted:
                for place in places[name]:
                    file = self._files[place]
                    if file not in opened:
                        opened[file] = stack.enter_context(_opened(file))
            parts = {place: opened[self._files[place]] for name in wanted for place in places[name]}
            _check_forms(parts, places, wanted)
            # Names of one parameter are read once.
            numbers = {place: part.get_tensor(place) for place, part in parts.items()}
            _check_ties(numbers, places, wanted)
            size = sum(tensor.nbytes for tensor in numbers.values())
            found = {name: numbers[places[name][0]] for name in wanted}
            return found, Loaded(len(numbers), size, tuple(sorted(file.name for file in opened)))


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise DamagedError(
            "a file is not in the format of safetensors",
            file=file,
            error=error,
            hint="download or save the directory again",
        ) from None


def _check_forms(parts: Mapping[str, Any], places: Mapping[str, Sequence[str]], wanted: Mapping[str, Tensor]) -> None:
    absent, shapes, dtypes = [], [], []
    held = {id(part): set(part.keys()) for part in parts.values()}
    for name, own in wanted.items():
        for place in places[name]:
            if place not in held[id(parts[place])]:
                absent.append(place)
                continue
            form = parts[place].get_slice(place)
            if list(form.get_shape()) != list(own.shape):
                shapes.append(f"{name} {list(form.get_shape())}, the model {list(own.shape)}")
            elif DTYPES.get(form.get_dtype()) is not own.dtype:
                dtypes.append(f"{name} {form.get_dtype()}, the model {_short(own.dtype)}")
    if absent:
        hint = "download or save the directory again"
        raise DamagedError("a file lacks tensors that the index says it has", names=listed(absent), hint=hint)
    if shapes:
        hint = "a model of the configuration in that directory"
        raise CheckpointError("tensors have other shapes than in the model", names=listed(shapes), hint=hint)
    if dtypes:
        hint = "model.to(dtype) before it is planned, or from_config(config, dtype=...), with that of the files"
        raise CheckpointError("tensors have another type than in the model", names=listed(dtypes), hint=hint)


def _check_ties(
    numbers: Mapping[str, Tensor], places: Mapping[str, Sequence[str]], wanted: Mapping[str, Tensor]
) -> None:
    for name in wanted:
        first, *others = places[name]
        for other in others:
            # Bytes, so that what is not a number is the same as itself.
            if not torch.equal(_bytes(numbers[first]), _bytes(numbers[other])):
                raise CheckpointError(
                    "names that are one parameter in the model have different numbers in the checkpoint",
                    names=(first, other),
                    hint="a configuration with tie_word_embeddings=False, if they are meant to differ",
                )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
