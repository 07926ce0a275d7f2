"""Kinds of torch functions, by name: those that read metadata, write in place, or draw random numbers."""

from typing import Any

import torch
from torch import Tensor

from penstock.ir import leaves

# fmt: off
_METADATA_GETTERS = frozenset(
    {
        "shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "is_cpu", "is_meta", "layout", "is_leaf",
        "grad_fn", "is_sparse", "is_quantized", "is_nested", "names", "itemsize", "nbytes", "is_mkldnn", "is_mps",
        "is_xpu", "is_xla", "is_ipu", "is_maia", "is_vulkan", "is_mtia", "output_nr", "_version", "grad",
    }
)
_METADATA_CALLS = frozenset(
    {
        "size", "dim", "numel", "stride", "is_contiguous", "is_floating_point", "is_complex", "element_size",
        "get_device", "storage_offset", "ndimension", "__len__", "is_inference", "is_signed", "data_ptr",
        "nelement", "untyped_storage", "is_conj", "is_neg", "is_same_size", "result_type", "can_cast",
        "promote_types", "is_tensor", "__format__", "__repr__", "__hash__", "is_pinned", "is_shared",
    }
)
_SIZE_GETTERS = frozenset({"shape", "nbytes"})
_SIZE_CALLS = frozenset({"size", "numel", "nelement", "__len__", "stride", "is_same_size", "untyped_storage"})
_IN_PLACE_OPERATORS = frozenset(
    {
        "__setitem__", "__iadd__", "__isub__", "__imul__", "__imatmul__", "__itruediv__", "__idiv__", "__ifloordiv__",
        "__imod__", "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__",
    }
)
_FLAG_SETTERS = frozenset({"requires_grad_", "detach_", "share_memory_", "rename_"})
_RANDOM = frozenset(
    {
        "bernoulli", "multinomial", "normal", "rand", "rand_like", "randint", "randn", "randn_like", "randperm",
        "uniform",
    }
)
# fmt: on
TENSOR_EFFECTS = frozenset(
    ("register_hook", "retain_grad", "register_post_accumulate_grad_hook", "detach_", "requires_grad_")
)
"""calls that are recorded although they return no new tensor: like in-place writes, they change their tensor"""
GRADIENT_FUNCTIONS = frozenset((torch.autograd.grad, torch.autograd.backward, Tensor.backward))


def reads_metadata(func: Any) -> bool:
    """Whether the result is the same for every batch of one signature, as for `x.dtype`."""
    getter = _getter_name(func)
    return getter in _METADATA_GETTERS if getter else _name(func) in _METADATA_CALLS


def reads_size(func: Any) -> bool:
    """Whether the function reads a size, which may depend on the content of other tensors, as after `nonzero`."""
    getter = _getter_name(func)
    return getter in _SIZE_GETTERS if getter else _name(func) in _SIZE_CALLS


def reads_gradient(func: Any) -> bool:
    return _getter_name(func) == "grad"


def sets_requires_grad(func: Any) -> bool:
    return _name(func) == "__set__" and getattr(func.__self__, "__name__", "") == "requires_grad"


def writes_in_place(func: Any) -> bool:
    """Whether the function writes into its first argument, by its name: a write to `x.data` increases no version."""
    name = _name(func)
    return name in _IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__") and name not in _FLAG_SETTERS)


def is_random(func: Any, args: Any, kwargs: Any, result: Any) -> bool:
    """Whether a call draws random numbers although torch's default generators do not move.

    They do not move on the meta device, nor for a call that is passed its own generator.
    """
    if any(isinstance(leaf, torch.Generator) for leaf in leaves((args, kwargs))):
        return True
    return draws_on_meta(func, args, kwargs, result)


def draws_on_meta(func: Any, args: Any, kwargs: Any, result: Any) -> bool:
    """Whether a function on the meta device, where no generator moves, would draw random numbers on a real one."""
    if not isinstance(result, Tensor) or not result.is_meta:
        return False
    name = _name(func)
    if name == "scaled_dot_product_attention":
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    if "dropout" in name:
        probability = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
        return bool(probability and kwargs.get("training", args[2] if len(args) > 2 else True))
    return name.rstrip("_") in _RANDOM


def _name(func: Any) -> str:
    return getattr(func, "__name__", "")


def _getter_name(func: Any) -> str:
    """The attribute that a getter reads, such as `shape`; "" if the function is not a getter."""
    return getattr(getattr(func, "__self__", None), "__name__", "") if _name(func) == "__get__" else ""
