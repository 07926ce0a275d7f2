"""The kinds of dtypes by their names are those of torch."""

import pytest
import torch

from penstock.ir import ITEM_BYTES, is_floating_point, is_integer


@pytest.mark.parametrize("name", ITEM_BYTES)
def test_a_dtype_is_of_the_kind_that_torch_says(name: str) -> None:
    dtype = getattr(torch, name)
    assert is_floating_point(name) == dtype.is_floating_point
    is_quantized = name in ("quint8", "qint8", "qint32")
    is_other = dtype.is_complex or dtype.is_floating_point or dtype == torch.bool or is_quantized
    assert is_integer(name) == (not is_other)
