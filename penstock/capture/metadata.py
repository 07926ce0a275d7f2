"""Metadata: what torch functions tell about a tensor without looking at its numbers."""

from typing import Any

# fmt: off
_GETTERS = frozenset(
    {
        "shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "is_cpu", "is_meta", "layout", "is_leaf",
        "grad_fn", "is_sparse", "is_quantized", "is_nested", "names", "itemsize", "nbytes", "is_mkldnn", "is_mps",
        "is_xpu", "is_xla", "is_ipu", "is_maia", "is_vulkan", "is_mtia", "output_nr", "_version", "grad",
    }
)
_CALLS = frozenset(
    {
        "size", "dim", "numel", "stride", "is_contiguous", "is_floating_point", "is_complex", "element_size",
        "get_device", "storage_offset", "ndimension", "__len__", "is_inference", "is_signed", "data_ptr",
        "nelement", "untyped_storage", "is_conj", "is_neg", "is_same_size", "result_type", "can_cast",
        "promote_types", "is_tensor", "__format__", "__repr__", "__hash__", "is_pinned", "is_shared",
    }
)
_SIZES = frozenset({"size", "numel", "nelement", "__len__", "stride", "is_same_size", "untyped_storage"})
_WRITING = frozenset(
    {
        "__setitem__", "__iadd__", "__isub__", "__imul__", "__imatmul__", "__itruediv__", "__idiv__", "__ifloordiv__",
        "__imod__", "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__",
    }
)
_FLAGS = frozenset({"requires_grad_", "detach_", "share_memory_", "rename_"})
# fmt: on


def is_metadata(func: Any) -> bool:
    """Whether the function says the same for every batch of one form."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") in _GETTERS
    return name in _CALLS


def is_gradient(func: Any) -> bool:
    """Whether the function tells the gradient that a tensor has."""
    name = getattr(func, "__name__", "")
    return name == "__get__" and getattr(getattr(func, "__self__", None), "__name__", "") == "grad"


def is_writing(func: Any) -> bool:
    """Whether the function writes into its first argument, also where no version is counted, as through `data`."""
    name = getattr(func, "__name__", "")
    return name in _WRITING or (name.endswith("_") and not name.endswith("__") and name not in _FLAGS)


def is_size(func: Any) -> bool:
    """Whether the function tells a size, which may depend on the numbers of other tensors."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") in ("shape", "nbytes")
    return name in _SIZES
