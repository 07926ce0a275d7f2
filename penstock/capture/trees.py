"""Trees: writes Python arguments down as plain trees; what text cannot hold goes into the live table."""

import enum
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.overrides import resolve_name

from penstock.capture.book import has_same_numbers
from penstock.capture.inside import holds_tensors
from penstock.errors import CaptureError
from penstock.ir import Container, ObjectRef, Ref, State, Tree, take_apart

Naming = Callable[[Tensor], "Ref | State | None"]
_NAN = float("nan")
_TORCH_WORDS = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator)


@dataclass(frozen=True)
class Apply:
    """The `apply` of an autograd function, looked up when it is called."""

    function: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.apply(*args, **kwargs)


class Trees:
    """Trees of arguments and, in `live`, what they mention by key."""

    def __init__(self, naming: Naming) -> None:
        self.naming = naming
        self.live: dict[str, Any] = {}
        self._constants: dict[str, tuple[Tensor, Tensor]] = {}

    def write(self, thing: object, where: str) -> Tree:
        """The tree of a Python structure; a tensor in it that has no name is refused."""
        if is_plain(thing):
            # One object for all that is not a number: records are compared, and it is equal to nothing but itself.
            return _NAN if thing != thing else thing  # type: ignore[return-value]
        if isinstance(thing, Tensor):
            return self._tensor(thing, where)
        if parts := take_apart(thing):
            keys = tuple(self.write(key, where) for key in parts.keys)
            return Container(self.key(parts.kind), keys, tuple(self.write(item, where) for item in parts.items))
        if isinstance(thing, nn.Module):
            raise CaptureError(
                "a module is handed to a function or to another module, which hides whose parameters are used",
                module=type(thing).__name__,
                where=where,
                hint="keep the module around both whole (basic_blocks)",
            )
        if holds_tensors(thing):
            raise CaptureError(
                "an object that holds tensors goes from one part of the model to another",
                object=type(thing).__name__,
                where=where,
                hint="pass tensors in lists, tuples, dicts or dataclasses, or keep the module around both whole "
                "(basic_blocks); for Hugging Face models use_cache=False",
            )
        return ObjectRef(self.key(thing))

    def _tensor(self, tensor: Tensor, where: str) -> Tree:
        found = self.naming(tensor)
        if found is not None:
            return found
        if is_functorch_wrapped_tensor(tensor):
            raise CaptureError(
                "a function is transformed between blocks (torch.vmap, torch.func), which hides what it is called with",
                where=where,
                hint="keep the module that does so whole (basic_blocks)",
            )
        if tensor.requires_grad:
            raise unknown_origin(tensor, where)
        return self._constant(tensor)

    def _constant(self, tensor: Tensor) -> ObjectRef:
        """A tensor that is no part of the model, such as a global variable; all forwards must use the same one."""
        key = self.key(tensor)
        if key not in self._constants:
            self._constants[key] = tensor, tensor.detach().clone()
        return ObjectRef(key)

    def put_back_constants(self) -> list[Tensor]:
        """Undo what was written into tensors that are no part of the model; returns those."""
        changed = [
            (tensor, content)
            for tensor, content in self._constants.values()
            if not tensor.is_meta and not has_same_numbers(tensor, content)
        ]
        for tensor, content in changed:
            tensor.data.copy_(content)
        return [tensor for tensor, _ in changed]

    def key(self, thing: Any) -> str:
        """The key under which something is kept in the live table."""
        name = _name(thing)
        if name in self.live and not _same(self.live[name], thing):
            name = next(key for n in range(2, 1 << 30) if _same(self.live.get(key := f"{name}@{n}", thing), thing))
        self.live.setdefault(name, thing)
        return name


def unknown_origin(tensor: Tensor, where: str) -> CaptureError:
    """What is said of a tensor that nobody will find when the record is played."""
    return CaptureError(
        "a tensor of unknown origin is used",
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        where=where,
        hint="make it a buffer (register_buffer), or keep the module whole (basic_blocks)",
    )


def _name(thing: Any) -> str:
    if isinstance(thing, _TORCH_WORDS):
        return f"{type(thing).__name__}:{thing}" if not isinstance(thing, torch.Generator) else "generator"
    if isinstance(thing, enum.Enum):
        return f"{type(thing).__name__}.{thing.name}"
    if callable(thing):
        return _function_name(thing)
    return f"constant:{type(thing).__name__}"


def _function_name(function: Any) -> str:
    if isinstance(function, Apply):
        return f"{function.function.__module__}.{function.function.__qualname__}.apply"
    name = _name_in_torch()(function) or getattr(function, "__qualname__", None) or type(function).__name__
    module = getattr(function, "__module__", None)
    return name if name.startswith("torch.") or not module else f"{module}.{name}"


@cache
def _name_in_torch() -> Callable[[Any], str | None]:
    """What torch calls a function; it silences warnings around every call, which only the first one needs."""
    resolve_name(torch.relu)
    return inspect.unwrap(resolve_name)


def short_name(function: Any) -> str:
    """The last word of a function's name, as nodes are called by it."""
    words = [word for word in re.split(r"[^A-Za-z0-9_]+", _function_name(function)) if word not in ("__get__", "apply")]
    return words[-1].strip("_") or "call"


def _same(one: Any, other: Any) -> bool:
    """Whether two things may share a key: equal, and not only equal numbers of different types."""
    if one is other or isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other
    try:
        return bool(type(one) is type(other) and one == other)
    except (ValueError, RuntimeError, TypeError):
        return False


def is_plain(leaf: object) -> bool:
    """Whether a leaf can be written down as it is; subclasses of numbers and texts may be more than those."""
    return leaf is None or type(leaf) in (bool, int, float, str)
