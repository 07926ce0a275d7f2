"""Detects side effects of calls: in-place writes, state updates, random numbers, reads of metadata."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from penstock.capture.arguments import FunctionApply
from penstock.capture.draws import PythonDraw
from penstock.capture.functions import WholeFunction
from penstock.capture.generators import GeneratorStates, module_generators, python_generators, torch_generators
from penstock.capture.tensor_table import TensorTable, buffers_and_attributes, same_content, storage_id
from penstock.ir import leaves


class CallEffects:
    """The versions, buffers and generators that one call may change, saved before the call and compared after it."""

    def __init__(self, table: TensorTable, target: Any, tensors: list[Tensor]) -> None:
        """`target` is the module or function to be called, `tensors` are all tensors among its arguments."""
        self._module = target if isinstance(target, nn.Module) else None
        self._versions = [(tensor, tensor._version) for tensor in tensors]
        self.own: dict[int, Tensor] = {}
        """the state of the module itself, by identity"""
        if self._module is not None:
            own = (*self._module.parameters(), *buffers_and_attributes(self._module).values())
            self.own = {id(tensor): tensor for tensor in own}
        # A call may write state through a view that it is given, so state that shares memory with an argument counts
        # too.
        shared = [tensor for argument in tensors for tensor in table.state_sharing(argument)]
        state = {id(tensor): tensor for tensor in (*shared, *self.own.values()) if id(tensor) in table.state}
        self._state = [
            # Parameters are large and rarely written: they are not copied, and only their versions compared.
            (
                tensor,
                tensor._version,
                None if tensor.is_meta or isinstance(tensor, nn.Parameter) else tensor.detach().clone(),
            )
            for tensor in state.values()
        ]
        # Held, so that the id() of a replaced buffer is not given to another tensor.
        self._buffers = _buffers_by_id(self._module)
        parts = self._module.modules() if self._module is not None else ()
        is_cuda = any(tensor.is_cuda for tensor in (*tensors, *state.values()))
        self._generators = GeneratorStates([*torch_generators(is_cuda), *module_generators(parts)])
        self._python_generators = GeneratorStates(python_generators() if runs_python(target) else ())

    def written_arguments(self, written_storage: set[int]) -> list[Tensor]:
        """The arguments that the call wrote into; `written_storage`: where it was seen to write in place."""
        return [
            tensor
            for tensor, version in self._versions
            if tensor._version != version or (written_storage and storage_id(tensor) in written_storage)
        ]

    def written_state(self, written_arguments: list[Tensor]) -> list[Tensor]:
        """The parameters and buffers that the call wrote into, also through views, or replaced."""
        storage = {storage_id(tensor) for tensor in written_arguments}
        replaced = self._buffers.keys() - _buffers_by_id(self._module).keys()
        unseen = _meta_statistics(self._module) if any(tensor.is_meta for tensor in self.own.values()) else ()
        return [
            tensor
            for tensor, version, content in self._state
            if tensor._version != version
            or id(tensor) in replaced
            or id(tensor) in unseen
            or (storage and storage_id(tensor) in storage)
            # Some kernels (batch norm's running statistics) write buffers without increasing the version.
            or (content is not None and not same_content(tensor, content))
        ]

    def drew_random_numbers(self) -> bool:
        """Whether the call drew random numbers, or is a module that does so in this mode."""
        if self._generators.have_moved() or self.drew_with_python():
            return True
        # On the meta device dropout draws nothing, but the real module will.
        parts = self._module.modules() if self._module is not None else ()
        return any(isinstance(part, _DropoutNd) and part.training and part.p > 0 for part in parts)

    def drew_with_python(self) -> bool:
        """Whether the call drew from the global generators of Python or numpy."""
        return self._python_generators.have_moved()


def runs_python(target: Any) -> bool:
    """Whether a call runs Python code: a torch function cannot draw from the generators of Python and numpy."""
    return isinstance(target, nn.Module | FunctionApply | PythonDraw | WholeFunction)


def _buffers_by_id(module: nn.Module | None) -> dict[int, Tensor]:
    return {id(buffer): buffer for buffer in module.buffers()} if module is not None else {}


def _meta_statistics(module: nn.Module | None) -> set[int]:
    """Running statistics on the meta device: their writes show neither in a version nor in the content."""
    norms = [part for part in module.modules() if isinstance(part, _NormBase)] if module is not None else []
    return {id(buffer) for norm in norms if norm.training for buffer in norm.buffers() if buffer.is_meta}


# Kinds of torch functions, by name

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
GRADIENT_FUNCTIONS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)


def reads_metadata(func: Any) -> bool:
    """Whether the result is the same for every batch of one signature, as for `x.dtype`."""
    getter = _getter_name(func)
    return getter in _METADATA_GETTERS if getter else _name(func) in _METADATA_CALLS


def reads_size(func: Any) -> bool:
    """Whether the function reads a size, which may depend on the content of other tensors, as after `nonzero`."""
    getter = _getter_name(func)
    return getter in _SIZE_GETTERS if getter else _name(func) in _SIZE_CALLS


def reads_gradient(func: Any) -> bool:
    """Whether the function reads `tensor.grad`."""
    return _getter_name(func) == "grad"


def sets_requires_grad(func: Any) -> bool:
    """Whether the function assigns `tensor.requires_grad`."""
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
