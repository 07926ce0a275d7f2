"""Builds: a model and its example batch, made by a function in a file that the user names as FILE.py:FUNCTION."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from difflib import get_close_matches
from importlib.util import module_from_spec, spec_from_file_location
from inspect import isfunction
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any, NamedTuple

from penstock.errors import PenstockError

EXAMPLE = "return model, args, kwargs"


class Build(NamedTuple):
    """A model and one batch that it is called with."""

    model: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@contextmanager
def built(target: str) -> Iterator[Build]:
    """What the function returns; while it is in use, the file's neighbours can be imported and prints go to stderr."""
    path, name = _parted(target)
    folder = str(path.resolve().parent)
    module_name = f"penstock_build_{path.stem}"
    sys.path.insert(0, folder)
    try:
        with redirect_stdout(sys.stderr):
            function = _function(_load(path, module_name), path, name)
            with told(f"the function {name} failed", path):
                returned = function()
            yield _build(returned, name)
    finally:
        sys.path.remove(folder)
        sys.modules.pop(module_name, None)


@contextmanager
def told(problem: str, path: Path, kind: type[PenstockError] = PenstockError) -> Iterator[None]:
    """An error in code of the user's becomes one message, with the line of the user's file where it has one."""
    try:
        yield
    except (PenstockError, KeyboardInterrupt):
        raise
    except (Exception, SystemExit) as error:
        frames = extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path.resolve()]
        if isinstance(error, SyntaxError):
            lines.append(error.lineno)
        where = f"{path}:{lines[-1]}" if lines else path
        message = " ".join(str(error).split())
        what = f"{type(error).__name__}: {message}" if message else type(error).__name__
        raise kind(problem, file=where, error=what) from error


def _parted(target: str) -> tuple[Path, str]:
    file, colon, name = target.rpartition(":")
    if not colon or not file or not name:
        hint = "FILE.py:FUNCTION, such as model.py:build"
        raise PenstockError("not a file and a function", given=repr(target), hint=hint)
    path = Path(file)
    if not path.is_file():
        raise PenstockError("no such file", file=path)
    return path, name


def _load(path: Path, module_name: str) -> ModuleType:
    spec = spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise PenstockError("not a Python file", file=path, hint="a file whose name ends in .py")
    module = module_from_spec(spec)
    sys.modules[module_name] = module  # as dataclasses and others look their classes' module up
    with told("the file cannot be loaded", path):
        spec.loader.exec_module(module)
    return module


def _function(module: ModuleType, path: Path, name: str) -> Callable[[], Any]:
    found = vars(module).get(name)
    if callable(found):
        return found  # type: ignore[no-any-return]
    own = [key for key, value in vars(module).items() if isfunction(value) and value.__module__ == module.__name__]
    hint = f"one of {', '.join(own)}" if own else f"def {name}(): ... {EXAMPLE}"
    if close := get_close_matches(name, own, n=1):
        hint = f"did you mean {close[0]}?"
    raise PenstockError("no such function in the file", function=repr(name), file=path, hint=hint)


def _build(returned: Any, name: str) -> Build:
    """(model, args, kwargs), (model, args), or a model with an example: a tensor, a tuple or a mapping by name."""
    from torch import nn

    model, *rest = returned if isinstance(returned, tuple | list) and returned else (returned,)
    if not isinstance(model, nn.Module) or len(rest) > 2:
        got = f"{type(model).__name__} and {len(rest)} more" if rest else type(model).__name__
        raise PenstockError("the function does not return a model and its batch", function=name, got=got, hint=EXAMPLE)
    if len(rest) == 2:
        args, kwargs = rest
        if not isinstance(args, tuple | list) or not isinstance(kwargs, Mapping):
            got = f"{type(args).__name__} and {type(kwargs).__name__}"
            raise PenstockError("args is a tuple and kwargs a dict", function=name, got=got, hint=EXAMPLE)
        return Build(model, tuple(args), dict(kwargs))
    example = rest[0] if rest else ()
    if isinstance(example, Mapping):
        return Build(model, (), dict(example))
    return Build(model, tuple(example) if isinstance(example, tuple | list) else (example,), {})
