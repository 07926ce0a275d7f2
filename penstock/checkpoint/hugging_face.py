"""Hugging Face: which file of a directory holds which tensor, as `save_pretrained` lays them down."""

import json
from pathlib import Path, PurePosixPath

from safetensors import SafetensorError, safe_open

from penstock.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_AGAIN = "download or save the directory again"


def is_here(directory: Path) -> bool:
    """Whether a directory holds a model in safetensors."""
    return (directory / SINGLE).is_file() or (directory / INDEX).is_file()


def files(directory: Path) -> dict[str, Path]:
    """For every tensor, by its name, the file that has it; of one file and an index, the file counts."""
    if (directory / SINGLE).is_file():
        return dict.fromkeys(_names(directory / SINGLE), directory / SINGLE)
    index = directory / INDEX
    places = {name: directory / _plain_name(file, index) for name, file in _weight_map(index).items()}
    missing = sorted({file.name for file in places.values() if not file.is_file()})
    if missing:
        raise CheckpointError("files of the checkpoint are missing", path=directory, missing=missing, hint=_AGAIN)
    return places


def _names(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            "a file is not in the format of safetensors", file=file, error=error, hint=_AGAIN
        ) from None


def _weight_map(index: Path) -> dict[str, object]:
    try:
        found = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError("the index cannot be read", file=index, error=error, hint=_AGAIN) from None
    names = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(names, dict) or not names:
        raise CheckpointError("the index has no weight_map of files by name", file=index, hint=_AGAIN)
    return names


def _plain_name(file: object, index: Path) -> str:
    """A name of a file beside the index; anything that leads elsewhere is refused."""
    is_plain = isinstance(file, str) and PurePosixPath(file).name == file and "\\" not in file and "\0" not in file
    if not is_plain or not str(file).endswith(".safetensors"):
        raise CheckpointError(
            "the index names something that is no safetensors file beside it",
            file=index,
            names=repr(file),
            hint="a checkpoint whose index names files of its own directory only",
        )
    return str(file)
