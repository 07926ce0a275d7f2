"""Loss module: a loss function in the form of a module, so that it can be recorded like one."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from types import CodeType
from typing import Any

from torch import Tensor, nn

from penstock.ir import leaves

_DEPTH = 4
_FEW = 64


class LossModule(nn.Module):
    """`forward(output, target)` is the loss; the modules and tensors that the function holds are its parts.

    A record knows tensors by the modules that hold them: class weights in a closure need a holder.
    """

    def __init__(self, loss_fn: Callable[..., Any]) -> None:
        super().__init__()
        self._loss_fn = (loss_fn,)  # in a tuple, so that a module is a part only once
        held = {id(thing): thing for thing in _held(loss_fn)}
        modules = [thing for thing in held.values() if isinstance(thing, nn.Module)]
        inside = {id(part) for module in modules for part in module.modules() if part is not module}
        inside |= {id(state) for module in modules for state in (*module.parameters(), *module.buffers())}
        for place, thing in enumerate(thing for name, thing in held.items() if name not in inside):
            setattr(self, f"held_{place}", thing)

    def forward(self, output: Any, target: Any) -> Any:
        """The loss."""
        return self._loss_fn[0](output, target)


def _held(thing: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """The modules and tensors within reach of a function."""
    if isinstance(thing, Tensor | nn.Module):
        yield thing
    elif depth:
        for inner in _within(thing):
            yield from _held(inner, depth - 1)


def _within(thing: Any) -> Iterable[Any]:
    if isinstance(thing, functools.partial):
        return (thing.func, *thing.args, *thing.keywords.values())
    if inspect.ismethod(thing):
        return (thing.__self__, thing.__func__)
    if inspect.isfunction(thing):
        defaults = (*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values())
        return (*defaults, *_closure(thing), *_globals(thing))
    if isinstance(thing, list | tuple | dict):
        # A long one is data.
        return (leaf for leaf in leaves(thing) if leaf is not thing) if len(thing) <= _FEW else ()
    is_plain = isinstance(thing, type) or inspect.isbuiltin(thing) or inspect.ismodule(thing)
    return () if is_plain else list(getattr(thing, "__dict__", {}).values())


def _closure(function: Any) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            # A name that is not bound yet.
            continue


def _globals(function: Any) -> list[Any]:
    """What the code names and its file holds; functions of other files are looked into by nobody."""
    names = sorted({name for code in _codes(function.__code__) for name in code.co_names})
    found = [function.__globals__[name] for name in names if name in function.__globals__]
    own = [thing for thing in found if not inspect.isroutine(thing) or thing.__module__ == function.__module__]
    return [thing for thing in own if thing is not function]


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)
