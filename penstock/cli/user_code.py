"""Loads a function named as FILE.py:FUNCTION, and reports errors of the user's code with the line of their file."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from difflib import get_close_matches
from importlib.util import module_from_spec, spec_from_file_location
from inspect import isfunction
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any, NamedTuple

from penstock.errors import PenstockError


class UserFunction(NamedTuple):
    """A function, its name, and the file it was loaded from."""

    function: Callable[..., Any]
    name: str
    path: Path


@contextmanager
def user_function(target: str, example: str) -> Iterator[UserFunction]:
    """Load FILE.py:FUNCTION; in the body, modules in the same directory can be imported.

    `example` is the body of such a function, for the error if the function does not exist.
    """
    path, name = _parse(target)
    folder = str(path.resolve().parent)
    # The whole path is part of the name: two files of the same name in two folders are two modules.
    module_name = f"penstock_file_{path.stem}_{abs(hash(path.resolve())):x}"
    sys.path.insert(0, folder)
    try:
        with redirect_stdout(sys.stderr):
            module = _load(path, module_name)
        function = vars(module).get(name)
        if not callable(function):
            # Not those that it imports.
            functions = [k for k, v in vars(module).items() if isfunction(v) and v.__module__ == module_name]
            hint = f"one of {', '.join(functions)}" if functions else f"def {name}(): ... {example}"
            if close := get_close_matches(name, functions, n=1):
                hint = f"did you mean {close[0]}?"
            if function is not None:
                got = type(function).__name__
                raise PenstockError(
                    "not a function", name=repr(name), file=path, got=got, hint=f"def {name}(): {example}"
                )
            raise PenstockError("no such function in the file", function=repr(name), file=path, hint=hint)
        yield UserFunction(function, name, path)
    finally:
        sys.path.remove(folder)
        sys.modules.pop(module_name, None)


@contextmanager
def user_errors(problem: str, path: Path, kind: type[PenstockError] = PenstockError, hint: str = "") -> Iterator[None]:
    """Turn an exception of the user's code into a `kind` error that names the line in the user's file."""
    try:
        yield
    except (PenstockError, KeyboardInterrupt):
        raise
    except (Exception, SystemExit) as error:
        frames = extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path.resolve()]
        # The file itself may not parse; a module that it imports is named in the message of the error.
        if isinstance(error, SyntaxError) and Path(error.filename or "").resolve() == path.resolve():
            lines.append(error.lineno)
        location = f"{path}:{lines[-1]}" if lines else path
        from penstock.launch import text_of

        message = " ".join(text_of(error).split())
        text = f"{type(error).__name__}: {message}" if message else type(error).__name__
        raise kind(problem, file=location, error=text, hint=hint) from error


def _parse(target: str) -> tuple[Path, str]:
    """The existing file and the name of FILE.py:FUNCTION."""
    file, colon, name = target.rpartition(":")
    if not colon or not file or not name:
        hint = "FILE.py:FUNCTION, such as model.py:build, or hf:NAME, such as hf:llama"
        if target.endswith(".py"):
            hint = f"{target}:FUNCTION, which returns the model and a batch"
        if target.endswith(".json"):
            hint = f"penstock explain {target} if that is a plan, or penstock show {target}"
        raise PenstockError("expected FILE.py:FUNCTION", got=repr(target), hint=hint)
    path = Path(file)
    if path.is_dir():
        raise PenstockError("expected a file, got a directory", path=path, hint=f"{path / 'FILE.py'}:{name}")
    if not path.is_file():
        nearby = [str(each) for each in path.parent.glob("*.py")] if path.parent.is_dir() else []
        close = get_close_matches(str(path), nearby, n=1) or nearby[:1]
        hint = f"{close[0]}:{name}" if close else "a path relative to the current directory"
        raise PenstockError("no such file", file=path, hint=hint)
    return path, name


def _load(path: Path, module_name: str) -> ModuleType:
    """Run the file as a module of that name."""
    if module_name in sys.modules:  # another function of the same file is in use
        return sys.modules[module_name]
    spec = spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise PenstockError("not a Python file", file=path, hint="a file whose name ends in .py")
    module = module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and others look up the module of a class there
    with user_errors("the file cannot be loaded", path, hint=f"python {path}, until it runs without an error"):
        spec.loader.exec_module(module)
    return module
