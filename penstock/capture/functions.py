"""Functions of the user that are recorded as one call, because the calls inside them cannot be replayed.

An example is the loss of an object detector: it reads activations into numpy to match boxes, and the calls that follow
depend on their values. As one call it runs unchanged, on the stage that has its arguments.
"""

import inspect
import sys
import types
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from penstock.capture.objects import runs_model_code
from penstock.capture.tensors import tensors_in
from penstock.ir import map_leaves

FunctionHandler = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""takes a function and the arguments of its call"""
Entry = tuple[dict[Any, Any], Any, Callable[..., Any]]
"""a dict, such as the globals of a file, a key in it, and the function under that key"""


@dataclass(frozen=True)
class WholeFunction:
    """A function that is recorded as one call."""

    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # If it returns an argument itself, that becomes a new value: for another batch it may return something else.
        given = set(map(id, tensors_in((args, kwargs))))
        result = self.function(*args, **kwargs)
        return map_leaves(result, lambda leaf: leaf.view_as(leaf) if id(leaf) in given else leaf)


@dataclass
class WholeFunctions:
    """The functions of the user that are recorded as one call, by the reason."""

    drawing: list[Callable[..., Any]] = field(default_factory=list)
    """they draw with Python's or numpy's generators"""
    reading: list[Callable[..., Any]] = field(default_factory=list)
    """they read activations, or use tensors that a replay could not find"""
    opened: list[Callable[..., Any]] = field(default_factory=list)
    """they were in `reading` but cannot be one call: values enter or leave them other than as arguments and results"""

    def copy(self) -> "WholeFunctions":
        """The same functions in lists of their own."""
        return WholeFunctions([*self.drawing], [*self.reading], [*self.opened])

    def open(self, function: Callable[..., Any]) -> None:
        """Record the calls inside a function in `reading` from now on."""
        self.reading.remove(function)
        self.opened.append(function)


def enclosing_function(modules: Collection[int]) -> tuple[Callable[..., Any] | None, bool]:
    """Find the outermost function of the user that is running, up to the method of a module that called it.

    `modules` are the ids of the modules. Returns the function, None if it is not global, as only calls by a global name
    can be intercepted; and whether any such function is running.
    """
    found, is_inside = None, False
    frame: types.FrameType | None = sys._getframe(1)

    def is_method_of_module(frame: types.FrameType) -> bool:
        code = frame.f_code
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        return isinstance(first, nn.Module) and id(first) in modules

    while frame is not None and not is_method_of_module(frame):
        if runs_model_code(frame):
            is_inside = True
            function = frame.f_globals.get(frame.f_code.co_name)
            if callable(function) and getattr(inspect.unwrap(function), "__code__", None) is frame.f_code:
                found = function
        frame = frame.f_back
    return (found, is_inside) if frame is not None else (None, False)


def intercept_functions(
    handler: FunctionHandler, functions: Collection[Callable[..., Any]]
) -> AbstractContextManager[None]:
    """Route calls of some global functions through `handler(function, args, kwargs)`."""
    return replaced_entries(handler, list(_entries_of(functions)) if functions else [])


@contextmanager
def replaced_entries(handler: FunctionHandler, entries: Collection[Entry]) -> Iterator[None]:
    """Replace functions in dicts by ones that call the handler; restore them at exit.

    An entry that does not hold its function now, as another library has replaced it, is left alone.
    """
    entries = [(namespace, name, function) for namespace, name, function in entries if namespace.get(name) is function]

    def replacement(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return handler(function, args, kwargs)

        return call

    try:
        for namespace, name, function in entries:
            namespace[name] = replacement(function)
        yield
    finally:
        for namespace, name, function in entries:
            namespace[name] = function


def _entries_of(functions: Collection[Callable[..., Any]]) -> Iterator[Entry]:
    """The global names of some functions, and the entries of global dicts that hold them."""
    wanted = {id(function): function for function in functions}
    namespaces = {
        id(vars(module)): vars(module) for module in list(sys.modules.values()) if hasattr(module, "__dict__")
    }
    # A function of a module that is not imported by a name, as in a notebook.
    namespaces |= {
        id(names): names for each in functions if (names := getattr(inspect.unwrap(each), "__globals__", None))
    }
    values = (value for names in namespaces.values() for value in list(names.values()))
    # Each dict once: every file refers to that of the builtins.
    dicts = namespaces | {id(value): value for value in values if type(value) is dict}
    for names in dicts.values():
        # Few have one of the functions: the others, with 100,000 names of libraries, are not looped over in Python.
        if not wanted.keys().isdisjoint(map(id, list(names.values()))):
            yield from ((names, key, wanted[id(each)]) for key, each in list(names.items()) if id(each) in wanted)
