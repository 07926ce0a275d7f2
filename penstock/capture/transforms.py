"""Calls of functions that `torch.vmap` and `torch.func` transform: each outermost one is recorded as one call.

Inside, tensors are wrapped and no call could be recorded. The transformed function may hold tensors in its closure, as
the mask functions of Hugging Face models do; these are recorded as arguments.
"""

import functools
import types
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch._functorch import apis, eager_transforms
from torch.overrides import TorchFunctionMode

from penstock.capture.functions import Entry
from penstock.capture.objects import UNASSIGNED, closure_contents
from penstock.ir import flatten_one_level, unflatten_one_level

TRANSFORMS = (
    (vars(apis), "vmap_impl"),
    (vars(eager_transforms), "grad_impl"),
    (vars(eager_transforms), "grad_and_value_impl"),
)
"""the functions of torch that call a transformed function: it is their first argument"""


def transform_entries() -> list[Entry]:
    """The functions that have these names now: another library may have replaced one."""
    return [(namespace, name, namespace[name]) for namespace, name in TRANSFORMS]


@dataclass(frozen=True)
class TransformedCall:
    """A transformed function; it is called with the tensors in its closure and the arguments of the transform."""

    transform: str
    run: Callable[..., Any]
    """runs the transform on a function and its arguments"""
    function: Callable[..., Any]
    """with a closure of its own (`with_own_closure`)"""
    modes: tuple[TorchFunctionMode, ...]
    """modes that the model entered around the call"""

    def __call__(self, held: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        tensors = iter(held)
        function = _replace_tensors(self.function, lambda _: next(tensors), {})
        with ExitStack() as stack:
            for mode in self.modes:
                stack.enter_context(mode)
            return self.run(function, *args, **kwargs)

    def is_like(self, other: "TransformedCall") -> bool:
        """Whether the other call differs at most in the tensors that its function holds."""
        kinds = tuple(map(type, self.modes)) == tuple(map(type, other.modes))
        return kinds and _constants(self.function, set()) == _constants(other.function, set())


def held_tensors(function: Callable[..., Any]) -> list[Tensor]:
    """The tensors in the closure of a function, and in those of the functions that it holds."""
    tensors: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    _replace_tensors(function, collect, {})
    return tensors


def with_own_closure(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the values that its closure has now: the model may change these variables after the call."""
    return _replace_tensors(function, lambda tensor: tensor, {})


def _replace_tensors(value: Any, change: Callable[[Tensor], Tensor], copies: dict[int, Any]) -> Any:
    """A copy with `change` applied to the tensors inside, in a fixed order.

    `copies` has those of the functions inside, by identity: a function may be reached in several ways.
    """
    if isinstance(value, Tensor):
        return change(value)
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, types.FunctionType) and value.__closure__:
        cells = tuple(types.CellType() for _ in value.__closure__)
        function = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
        function.__kwdefaults__ = value.__kwdefaults__
        # Before its cells are filled: the function may refer to itself.
        copies[id(value)] = function
        for cell, content in zip(cells, closure_contents(value), strict=True):
            if content is not UNASSIGNED:
                cell.cell_contents = _replace_tensors(content, change, copies)
        return function
    if isinstance(value, functools.partial):
        parts = (_replace_tensors(part, change, copies) for part in (value.func, value.args, value.keywords))
        function, args, keywords = parts
        return functools.partial(function, *args, **keywords)
    if container := flatten_one_level(value):
        items = [_replace_tensors(item, change, copies) for item in container.items]
        is_same = all(item is other for item, other in zip(items, container.items, strict=True))
        # Lists and dicts are always copied: they may change after the call.
        if is_same and not isinstance(value, list | dict):
            return value
        return unflatten_one_level(container.kind, container.keys, items)
    return value


def _constants(value: Any, seen: set[int]) -> Any:
    """The code and the plain values inside a function; equal for two functions that differ only in their tensors."""
    if isinstance(value, Tensor) or id(value) in seen:
        return None
    if isinstance(value, types.FunctionType):
        seen.add(id(value))
        return value.__code__, tuple(_constants(content, seen) for content in closure_contents(value))
    if isinstance(value, functools.partial):
        return tuple(_constants(part, seen) for part in (value.func, value.args, value.keywords))
    if container := flatten_one_level(value):
        return container.kind, repr(container.keys), tuple(_constants(item, seen) for item in container.items)
    return value if isinstance(value, bool | int | float | str | None) else type(value)
