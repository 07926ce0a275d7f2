"""Properties of a tensor that depend on its dtype: gradients, NaN and Inf, rounding; its entries as reals or bytes.

`ir/dtypes.py` lists the dtypes that are supported, with their sizes.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype as in records and messages to the user: `float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The dtype with that name, which must be one of `ITEM_BYTES`."""
    return getattr(torch, name)


INEXACT_DTYPES = frozenset(
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex)
)
"""rounded, real or complex numbers: only these have gradients, NaN and Inf"""

ARITHMETIC_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""real numbers that torch computes with, unlike those of 8 bits: losses, and operands whose weight gradients can be
deferred. Ranks send the position of a dtype in this tuple"""


def is_inexact(tensor: Tensor) -> bool:
    """Whether its dtype is one of `INEXACT_DTYPES`."""
    return tensor.dtype in INEXACT_DTYPES


def is_ordered(tensor: Tensor) -> bool:
    """Whether its entries are real numbers, so that they can be compared, counted or used as a weight."""
    return not tensor.is_complex()


def is_integer(tensor: Tensor) -> bool:
    """Whether its entries are integers, as token ids and labels are; not for bool."""
    return not is_inexact(tensor) and tensor.dtype != torch.bool


# Precision

ROUNDING: defaultdict[torch.dtype, float] = defaultdict(
    lambda: 5e-2,
    {torch.float64: 1e-10, torch.complex128: 1e-10, torch.float32: 1e-4, torch.complex64: 1e-4},
)
"""how far apart two results of this precision may be because of rounding, relative to the largest entry, if they are
equal in exact arithmetic and were computed in another order"""


def coarsest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The floating-point dtype of the lowest precision; the first one of several."""
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def in_double(tensor: Tensor) -> Tensor:
    """The tensor without gradient, dense, and in double precision."""
    tensor = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def in_precision(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The tensor in a floating-point dtype; itself for None, and if its entries are integers or complex numbers."""
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def is_close(tensor: Tensor, expected: Tensor, rounding: float = 0.0) -> bool:
    """Whether two tensors of one shape differ by rounding only. NaN equals NaN; of meta tensors shapes are compared.

    `rounding`: that of a lower precision in which they were computed, as in `ROUNDING`.
    """
    if tensor.is_meta or expected.is_meta:
        return tensor.shape == expected.shape
    if not is_inexact(tensor):
        return torch.equal(tensor, expected)
    if not tensor.numel():
        return True
    difference = (tensor - expected).abs().double()
    # NaN and Inf at the same places are equal.
    difference = difference[(tensor.isfinite() | expected.isfinite())]
    scale = float(expected[expected.isfinite()].abs().max()) if bool(expected.isfinite().any()) else 1.0
    return not difference.numel() or float(difference.max()) <= max(ROUNDING[expected.dtype], rounding) * scale


# Entries as real numbers or bytes


def real_entries(tensor: Tensor) -> Tensor:
    """The entries as real numbers, which can be ordered, compared and sent by every backend, in the same memory.

    A complex tensor gets one more dimension of length 2; any other tensor is returned as it is.
    """
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def from_real_entries(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor of this dtype that `real_entries` turned into this one, in the same memory."""
    return torch.view_as_complex(tensor) if dtype.is_complex else tensor


NUMPY_DTYPES = frozenset((torch.float32, torch.float64, torch.int64, torch.int32, torch.bool))
"""the most frequent of the dtypes that numpy has too: hashing such a tensor as an array is faster than as bytes"""


def contiguous_entries(tensor: Tensor) -> Tensor:
    """The tensor without gradient and with its entries in memory in their order; itself or a copy."""
    # Tensor.contiguous keeps conjugated and negated views, whose memory holds other numbers: backends refuse them.
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def as_bytes(tensor: Tensor) -> Tensor:
    """The entries as bytes, which every backend can send and numpy can read, in the same memory if it is contiguous."""
    return contiguous_entries(tensor).reshape(-1).view(torch.uint8)


def extremes(tensor: Tensor) -> Sequence[Tensor]:
    """The smallest and largest entry, of complex numbers among all their parts; both are NaN if any entry is.

    A scalar is returned as it is. On the host this is many times faster than a norm or isfinite on every entry.
    """
    if tensor.is_complex():
        tensor = real_entries(tensor)
    if tensor.dim() == 0:
        # A copy of a view, which may be one of a large tensor.
        return (tensor.clone() if tensor._is_view() else tensor,)
    return torch.aminmax(tensor) if tensor.numel() else ()


def real_inner_product(tensor: Tensor, other: Tensor) -> Tensor:
    """The sum of the products of their entries, of complex ones Re(t conj(o)): its gradient for `tensor` is `other`."""
    return (tensor * other.conj()).sum().real


def largest_magnitude(tensor: Tensor) -> Tensor:
    """The largest absolute value of the entries, which must not be empty; NaN if one is NaN."""
    # aminmax is many times faster on the host than torch.linalg.vector_norm with ord=inf.
    low, high = torch.aminmax(tensor.abs() if tensor.is_complex() else tensor)
    return torch.maximum(low.abs(), high.abs())
