"""Directory: what kind of checkpoint lies in a directory, decided here and nowhere else."""

import os
from pathlib import Path

from penstock.checkpoint import hugging_face, shelf
from penstock.checkpoint.manifest import read_manifest
from penstock.checkpoint.reading import Reader
from penstock.errors import CheckpointError

_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_ADAPTERS = ("adapter_model.safetensors", "adapter_config.json")


def open_directory(path: str | os.PathLike[str]) -> Reader:
    """The tensors that lie in a directory, of several checkpoints those of the newest; no number is read yet."""
    directory = _directory(path)
    if hugging_face.is_here(directory):
        return Reader(hugging_face.files(directory))
    newest, *_ = candidates(directory)
    return Reader({name: newest / file for name, (file, _, _) in read_manifest(newest).tensors.items()})


def is_hugging_face(path: str | os.PathLike[str]) -> bool:
    """Whether a directory is one that `save_pretrained` wrote."""
    return hugging_face.is_here(_directory(path))


def candidates(path: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints that a path may mean, the newest first: itself, or those that stand in it."""
    directory = _directory(path)
    if shelf.is_checkpoint(directory):
        return [directory]
    if found := shelf.steps(directory):
        return found
    raise _unknown(directory)


def _directory(path: object) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError("a checkpoint is the path of a directory", given=repr(path))
    directory = Path(path)
    if directory.is_dir():
        return directory
    if directory.exists():
        raise CheckpointError(
            "a checkpoint is a directory", given=directory, hint=f"the one around it: {directory.parent}"
        )
    raise CheckpointError(
        "no such directory",
        path=directory,
        hint="of a model on the Hugging Face Hub, huggingface_hub.snapshot_download(name) returns the directory",
    )


def _unknown(directory: Path) -> CheckpointError:
    found = sorted(item.name for item in directory.iterdir())
    if any(name in found for name in _PICKLED):
        return CheckpointError(
            "these weights are pickled, and loading them could run any code",
            path=directory,
            hint="Model.from_pretrained(path).save_pretrained(new_path), which writes safetensors",
        )
    if any(name in found for name in _ADAPTERS):
        return CheckpointError(
            "this directory has an adapter, and not the model that it is for",
            path=directory,
            hint="load it with peft, merge_and_unload(), and save_pretrained(new_path)",
        )
    return CheckpointError(
        "nothing here is known to hold a model's numbers",
        path=directory,
        found=", ".join(found[:5]) or "nothing",
        hint=f"where pipe.save wrote, or a directory with {hugging_face.SINGLE} or {hugging_face.INDEX}, "
        "as save_pretrained writes it",
    )
