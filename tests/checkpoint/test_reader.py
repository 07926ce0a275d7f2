"""Tensors are read only if all of them have the shape and dtype of the model."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from penstock.capture import RowSlice
from penstock.checkpoint import CheckpointReader, TensorReader
from penstock.checkpoint.tensor_file import write_tensors
from penstock.errors import CheckpointError, DamagedError
from tests.checkpoint.trainings import saved

PLACES = {"a": ("a",), "b": ("b", "c")}


def reader(directory: Path, **numbers: Tensor) -> TensorReader:
    save_file(numbers, directory / "x.safetensors")
    return TensorReader(dict.fromkeys(("a", "b", "c"), directory / "x.safetensors"))


def test_tied_tensors_are_read_once_for_each_name_in_the_file(tmp_path: Path) -> None:
    made = reader(tmp_path, a=torch.ones(2), b=torch.zeros(3), c=torch.zeros(3))
    found, loaded = made.read(PLACES, {"a": torch.empty(2), "b": torch.empty(3)})
    assert [found["a"].tolist(), found["b"].tolist()] == [[1, 1], [0, 0, 0]]
    assert (loaded.num_tensors, loaded.bytes_read) == (3, 32)


WRONG = {
    "lacks": {"a": torch.ones(2), "b": torch.zeros(3)},
    r"a \[3\], the model \[2\]": {"a": torch.ones(3), "b": torch.zeros(3), "c": torch.zeros(3)},
    r"a F64, the model float32": {"a": torch.ones(2).double(), "b": torch.zeros(3), "c": torch.zeros(3)},
    "different values": {"a": torch.ones(2), "b": torch.zeros(3), "c": torch.ones(3)},
}


@pytest.mark.parametrize("message", WRONG)
def test_other_shapes_dtypes_or_values_are_refused(message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message) as refusal:
        reader(tmp_path, **WRONG[message]).read(PLACES, {"a": torch.empty(2), "b": torch.empty(3)})
    assert refusal.value.hint


def test_complex128_tensors_are_stored_as_pairs_and_read_as_they_were(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {
        "scalar": torch.randn((), dtype=torch.complex128),
        "matrix": torch.randn(5, 3, dtype=torch.complex128).conj(),
        "real": torch.randn(3, 2),
    }
    write_tensors(tmp_path / "x.safetensors", tensors)
    with safe_open(tmp_path / "x.safetensors", framework="pt") as opened:
        assert torch.equal(opened.get_tensor("matrix"), torch.view_as_real(tensors["matrix"].resolve_conj()))
    made = TensorReader(dict.fromkeys(tensors, tmp_path / "x.safetensors"))
    places = {name: (name,) for name in tensors}
    found, loaded = made.read(places, tensors)
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert loaded.bytes_read == sum(tensor.nbytes for tensor in tensors.values())
    rows = {"matrix": RowSlice("matrix", 1, 3, 5, ("matrix",))}
    assert torch.equal(made.read(places, {"matrix": tensors["matrix"][1:3]}, rows)[0]["matrix"], tensors["matrix"][1:3])
    with pytest.raises(CheckpointError, match=r"matrix C128, the model float64"):
        made.read(places, {"matrix": torch.empty(5, 3, dtype=torch.float64)})
    with pytest.raises(CheckpointError, match=r"real \[3, 2\], the model \[3\]"):
        made.read(places, {"real": torch.empty(3, dtype=torch.complex128)})


def test_documents_of_ranks_are_in_the_order_of_the_ranks(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    with CheckpointReader(tmp_path / "step-000001") as found:
        record = found.manifest.files["random-000.json"]
        files = dict.fromkeys((f"scheduler-{rank:03d}.json" for rank in range(1001)), record)
        found.manifest = replace(found.manifest, files={**found.manifest.files, **dict(sorted(files.items()))})
        assert found.stems("scheduler") == [f"scheduler-{rank:03d}" for rank in range(1001)]


def test_a_document_whose_tensors_are_in_no_file_is_damaged(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    with CheckpointReader(tmp_path / "step-000001") as found, pytest.raises(DamagedError, match=r"^a document refers"):
        found.tensor_finder("missing")("a")
