"""Values arrive as they were sent, and strings without being unpickled."""

from multiprocessing.reduction import ForkingPickler

import pytest
import torch

from penstock.launch import serialization


@pytest.mark.parametrize("value", ["", "text", "\udcff and \u00e9", None, {"a": (1, b"t", [2.5])}])
def test_a_value_arrives_unchanged(value: object) -> None:
    assert serialization.unpack(serialization.pack(value)) == value


def test_a_tensor_arrives_as_a_copy() -> None:
    tensor = torch.arange(3)
    found = serialization.unpack(serialization.pack({"a": tensor}))["a"]
    tensor.zero_()
    assert found.tolist() == [0, 1, 2]


def test_a_string_is_never_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = serialization.pack("text")
    monkeypatch.setattr(ForkingPickler, "loads", None)
    assert serialization.unpack(packed) == "text"
