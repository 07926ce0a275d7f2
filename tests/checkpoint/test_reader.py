"""Tensors are read only if all of them have the shape and dtype of the model."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from penstock.checkpoint import TensorReader
from penstock.errors import CheckpointError

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
