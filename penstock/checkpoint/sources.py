"""Directories that hold a model: those of Hugging Face's `save_pretrained`, and hints for everything else."""

import json
import os
from pathlib import Path, PurePosixPath

from safetensors import SafetensorError, safe_open

from penstock.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DOWNLOAD_AGAIN = "download or save the directory again"
"""hint for damaged files of a directory"""
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_ADAPTERS = ("adapter_model.safetensors", "adapter_config.json")


def check_directory(path: object) -> Path:
    """The path of an existing directory; refused otherwise."""
    if not isinstance(path, str | os.PathLike):
        hint = "the directory given to pipe.save"
        raise CheckpointError("a checkpoint must be given as the path of a directory", got=repr(path), hint=hint)
    directory = Path(path)
    try:
        is_readable = not directory.is_dir() or os.access(directory, os.R_OK | os.X_OK)
    except PermissionError:  # of a directory around it
        is_readable = False
    if not is_readable:
        raise CheckpointError("the checkpoint cannot be read", path=directory, reason="Permission denied")
    if directory.is_dir():
        return directory
    if directory.exists():
        hint = f"its directory: {directory.parent}"
        raise CheckpointError("a checkpoint must be a directory, got a file", path=directory, hint=hint)
    raise CheckpointError(
        "no such directory",
        path=directory,
        hint="the directory of penstock train --checkpoint or of pipe.save; huggingface_hub.snapshot_download(name) "
        "downloads a model of the Hugging Face Hub into one",
    )


def is_hugging_face(path: str | os.PathLike[str]) -> bool:
    """Whether `save_pretrained` wrote this directory."""
    directory = check_directory(path)
    return (directory / SINGLE).is_file() or (directory / INDEX).is_file()


def hugging_face_files(directory: Path) -> dict[str, Path]:
    """The file of every tensor, by name; a single file takes precedence over an index."""
    if (directory / SINGLE).is_file():
        file = directory / SINGLE
        try:
            with safe_open(file, framework="pt") as opened:
                return dict.fromkeys(opened.keys(), file)
        except (SafetensorError, OSError) as error:
            raise CheckpointError("not a safetensors file", file=file, error=error, hint=DOWNLOAD_AGAIN) from None
    index = directory / INDEX
    try:
        document = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError("the index cannot be read", file=index, error=error, hint=DOWNLOAD_AGAIN) from None
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("the index must have a weight_map of files by name", file=index, hint=DOWNLOAD_AGAIN)
    files = {name: directory / _file_name(file, index) for name, file in weight_map.items()}
    missing = sorted({file.name for file in files.values() if not file.is_file()})
    if missing:
        raise CheckpointError(
            "files of the checkpoint are missing", path=directory, missing=missing, hint=DOWNLOAD_AGAIN
        )
    return files


def _file_name(file: object, index: Path) -> str:
    """The name of a file in the directory of the index; other paths are refused."""
    # Names come from a downloaded file: a path could lead to any file of the system.
    is_plain = isinstance(file, str) and PurePosixPath(file).name == file and "\\" not in file and "\0" not in file
    if not is_plain or not str(file).endswith(".safetensors"):
        raise CheckpointError(
            "the index must name safetensors files of its own directory",
            file=index,
            names=repr(file),
            hint="a checkpoint whose index names files of its own directory only",
        )
    return str(file)


def unknown_contents(directory: Path) -> CheckpointError:
    """The error for a directory that has no checkpoint; for a caller that loads Hugging Face models, none of these."""
    names = sorted(item.name for item in directory.iterdir())
    if SINGLE in names or INDEX in names:
        return CheckpointError(
            "this directory holds the weights of a model, and no checkpoint of a training",
            path=directory,
            hint="a model that is created with these weights, as by from_pretrained; in Python pipe.load(directory)",
        )
    if any(name in names for name in _PICKLED):
        return CheckpointError(
            "these weights are pickled, and loading them could run any code",
            path=directory,
            hint="Model.from_pretrained(path).save_pretrained(new_path), which writes safetensors",
        )
    if any(name in names for name in _ADAPTERS):
        return CheckpointError(
            "this directory holds an adapter without its base model",
            path=directory,
            hint="load it with peft, merge_and_unload(), and save_pretrained(new_path)",
        )
    return CheckpointError(
        "no checkpoint found in this directory",
        path=directory,
        found=", ".join(names[:5]) or "nothing",
        hint="the directory of penstock train --checkpoint or of pipe.save, or one with "
        f"{SINGLE} or {INDEX}, as written by save_pretrained",
    )
