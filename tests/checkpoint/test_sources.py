"""Directories that hold a model, and those that are refused before anything is read."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from penstock.checkpoint import find_checkpoints, open_tensors
from penstock.errors import CheckpointError

NUMBERS = {"a": torch.arange(3.0), "b": torch.ones(2, 2)}


def indexed(directory: Path, **files: str) -> Path:
    """A directory whose index names these files by tensor."""
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}), encoding="utf-8")
    return directory


def test_a_single_file_lists_its_tensors(tmp_path: Path) -> None:
    save_file(NUMBERS, tmp_path / "model.safetensors")
    assert set(open_tensors(tmp_path).names) == {"a", "b"}


def test_a_tensor_is_read_from_its_file_and_no_other_is_opened(tmp_path: Path) -> None:
    save_file({"a": NUMBERS["a"]}, tmp_path / "one.safetensors")
    (tmp_path / "two.safetensors").write_bytes(b"nothing that could be opened")
    reader = open_tensors(indexed(tmp_path, a="one.safetensors", b="two.safetensors"))
    found, loaded = reader.read({"a": ("a",)}, {"a": torch.empty(3)})
    assert torch.equal(found["a"], NUMBERS["a"])
    assert (loaded.bytes_read, loaded.files) == (12, ("one.safetensors",))


@pytest.mark.parametrize(
    "file", ["../one.safetensors", "/etc/passwd", "in/one.safetensors", "a.bin", "..", "", "a\\b.safetensors"]
)
def test_an_index_that_leads_elsewhere_is_refused(file: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="files of its own directory"):
        open_tensors(indexed(tmp_path, a=file))


def test_files_that_are_missing_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone\.safetensors"):
        open_tensors(indexed(tmp_path, a="gone.safetensors"))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}'])
def test_an_invalid_index_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match="index"):
        open_tensors(tmp_path)


OTHERS = {
    "pytorch_model.bin": "pickled",
    "pytorch_model.bin.index.json": "pickled",
    "adapter_model.safetensors": "adapter",
    "notes.txt": "no checkpoint found",
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_files_are_refused_with_a_hint(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=OTHERS[name]) as refusal:
        open_tensors(tmp_path)
    assert refusal.value.hint


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_weights_alone_are_no_checkpoint_to_resume_from(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=r"no checkpoint of a training .*\ntry: a model that is created with"):
        find_checkpoints(tmp_path)


def test_anything_but_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for given in (tmp_path / "file", tmp_path / "nowhere", 3):
        with pytest.raises(CheckpointError, match="director"):
            open_tensors(given)  # type: ignore[arg-type]


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    save_file(NUMBERS, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-5])
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        open_tensors(tmp_path)
