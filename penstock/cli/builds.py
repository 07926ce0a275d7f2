"""Builds: a model and its example batch, from a function in a file of the user's or a Hugging Face configuration."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from typer import Argument

from penstock.cli.named_functions import named_function, told
from penstock.cli.options import Example
from penstock.errors import CaptureError, PenstockError

EXAMPLE = "return model, args, kwargs"
HF = "hf:"
NOTHING_MADE_UP = Example()
MODEL_HELP = (
    "FILE.py:FUNCTION that returns a model, and args and kwargs of one batch; or hf:NAME, a Hugging Face model type or "
    "a directory with a config.json."
)
Model = Annotated[str, Argument(metavar="MODEL", help=MODEL_HELP)]


class Build(NamedTuple):
    """A model and one batch that it is called with."""

    model: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@contextmanager
def built(target: str, example: Example = NOTHING_MADE_UP) -> Iterator[Build]:
    """The model and its batch; what is printed meanwhile goes to stderr."""
    if target.startswith(HF):
        from penstock.cli.hf_builds import hf_build

        with redirect_stdout(sys.stderr), _without_numbers(example):
            yield Build(*hf_build(target.removeprefix(HF), example))
        return
    if example != NOTHING_MADE_UP:
        hint = f"make the batch in {target}, or name an hf: model"
        raise PenstockError("--batch, --sequence and --weights are for hf: models", given=target, hint=hint)
    with _returned(target) as build:
        yield build


@contextmanager
def _without_numbers(example: Example) -> Iterator[None]:
    """What fails without weights may run with them."""
    try:
        yield
    except CaptureError as error:
        if example.weights:
            raise
        hint = "--weights, as this model asks for the numbers on its way, if they fit in memory here"
        raise CaptureError(error.problem, report=error.report, hint=hint, **error.values) from error


def source_of(target: str) -> Path:
    """The file that a model is made from."""
    return Path(target.removeprefix(HF) if target.startswith(HF) else target.rpartition(":")[0])


@contextmanager
def _returned(target: str) -> Iterator[Build]:
    """What the function returns; while it is in use, the file's neighbours can be imported."""
    with named_function(target, example=EXAMPLE) as found, redirect_stdout(sys.stderr):
        shown = f'python -c "import {found.path.stem}; {found.path.stem}.{found.name}()" shows all of the traceback'
        with told(f"the function {found.name} failed", found.path, hint=shown):
            returned = found.function()
        build = _build(returned, found.name)
        _check_batch(build, found.name)
        yield build


def _check_batch(build: Build, name: str) -> None:
    try:
        signature(build.model.forward).bind(*build.args, **build.kwargs)
    except TypeError as error:
        raise CaptureError(
            "the model cannot be called with the batch of the function",
            function=name,
            model=type(build.model).__name__,
            reason=error,
            hint=EXAMPLE,
        ) from None


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
