"""Calls: lets a recorder see every call of a module or autograd function, for as long as it records."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

Handler = Callable[[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@contextmanager
def watched_modules(model: nn.Module, handler: Handler) -> Iterator[None]:
    """`handler(module, original, args, kwargs)` answers every call of a module.

    `__call__` is replaced on every class that defines it, as some override it, and put back at the end.
    """
    owners = {owner for module in model.modules() for owner in type(module).__mro__ if "__call__" in vars(owner)} - {
        object
    }
    saved = {owner: vars(owner)["__call__"] for owner in owners}
    try:
        for owner, original in saved.items():
            type.__setattr__(owner, "__call__", _module_call(handler, original))
        yield
    finally:
        for owner, original in saved.items():
            type.__setattr__(owner, "__call__", original)


def _module_call(handler: Handler, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return handler(self, original, args, kwargs)

    return call


@contextmanager
def watched_scripts(handler: Handler) -> Iterator[None]:
    """`handler(function, original, args, kwargs)` answers every call of a scripted function, which no mode sees."""
    owner = torch.jit.ScriptFunction
    original = owner.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        def run(*given: Any, **named: Any) -> Any:
            return original(self, *given, **named)

        return handler(self, run, args, kwargs)

    try:
        owner.__call__ = call  # type: ignore[method-assign]
        yield
    finally:
        owner.__call__ = original  # type: ignore[method-assign]


@contextmanager
def watched_functions(handler: Handler) -> Iterator[None]:
    """`handler(function class, original, args, kwargs)` answers every `apply` of an autograd function."""
    original = vars(torch.autograd.Function)["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        return handler(cls, original.__get__(None, cls), args, kwargs)

    try:
        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]
