"""Parcels: values arrive as they were sent, and texts without being unpickled."""

from multiprocessing.reduction import ForkingPickler

import pytest
import torch

from penstock.launch import parcels


@pytest.mark.parametrize("value", ["", "text", "\udcff and \u00e9", None, {"a": (1, b"t", [2.5])}])
def test_a_value_arrives_as_it_was(value: object) -> None:
    assert parcels.unpack(parcels.pack(value)) == value


def test_a_tensor_arrives_as_a_copy() -> None:
    tensor = torch.arange(3)
    found = parcels.unpack(parcels.pack({"a": tensor}))["a"]
    tensor.zero_()
    assert found.tolist() == [0, 1, 2]


def test_a_text_is_never_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    parcel = parcels.pack("text")
    monkeypatch.setattr(ForkingPickler, "loads", None)
    assert parcels.unpack(parcel) == "text"
