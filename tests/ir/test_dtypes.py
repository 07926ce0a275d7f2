"""The kinds of dtypes by their names are those of torch."""

import pytest
import torch

from penstock.ir import ITEM_BYTES, TensorSpec


@pytest.mark.parametrize("name", ITEM_BYTES)
def test_a_dtype_is_of_the_kind_that_torch_says(name: str) -> None:
    dtype, spec = getattr(torch, name), TensorSpec((), name)
    assert spec.is_floating_point == dtype.is_floating_point
    is_quantized = name in ("quint8", "qint8", "qint32")
    is_other = dtype.is_complex or dtype.is_floating_point or dtype == torch.bool or is_quantized
    assert spec.is_integer == (not is_other)
