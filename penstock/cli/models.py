"""Builds the model that a command names, with its example batch: FILE.py:FUNCTION or hf:NAME."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from typer import Argument

from penstock.cli.options import Example
from penstock.cli.user_code import user_errors, user_function
from penstock.errors import CaptureError, PenstockError

HF = "hf:"
NO_EXAMPLE = Example()
_BODY = "return model, args, kwargs"
Model = Annotated[
    str,
    Argument(
        metavar="MODEL",
        help="FILE.py:FUNCTION that returns a model, and args and kwargs of one batch; or hf:NAME, a Hugging Face "
        "model type or a directory with a config.json.",
    ),
]


class BuiltModel(NamedTuple):
    """A model and the arguments of one call."""

    model: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@contextmanager
def build_model(target: str, example: Example = NO_EXAMPLE, device: Any = None) -> Iterator[BuiltModel]:
    """Build the model and its batch, on a device if one is given. Inside, prints of the user's code go to stderr.

    A model without weights stays on the meta device.
    """
    if target.startswith(HF):
        from penstock.cli.hf_models import build_hf_model

        try:
            with redirect_stdout(sys.stderr):
                yield _moved(BuiltModel(*build_hf_model(target.removeprefix(HF), example)), device)
        except CaptureError as error:
            if example.weights:
                raise
            # Some models read values of their weights in the forward, which fails on the meta device.
            hint = "--weights, if they fit in memory here: this model reads values of tensors while it runs"
            raise CaptureError(error.problem, report=error.report, hint=hint, **error.values) from error
        return
    if example != NO_EXAMPLE:
        hint = f"make the batch in {target}, or name an hf: model"
        raise PenstockError("--batch, --sequence and --weights are for hf: models only", model=target, hint=hint)
    with user_function(target, example=_BODY) as build, redirect_stdout(sys.stderr):
        script = f"import runpy; runpy.run_path({str(build.path)!r})[{build.name!r}]()"
        hint = f'python -c "{script}" shows the whole traceback'
        with user_errors(f"the function {build.name} failed", build.path, hint=hint):
            returned = build.function()
        built = _as_built_model(returned, build.name)
        try:
            signature(built.model.forward).bind(*built.args, **built.kwargs)
        except TypeError as error:
            raise CaptureError(
                "the model cannot be called with the batch that the function returned",
                function=build.name,
                model=type(built.model).__name__,
                reason=error,
                hint=_BODY,
            ) from None
        yield _moved(built, device)


def _moved(built: BuiltModel, device: Any) -> BuiltModel:
    if device is None or any(tensor.is_meta for tensor in built.model.parameters()):
        return built
    args, kwargs = on_device((built.args, built.kwargs), device)
    return BuiltModel(built.model.to(device), args, kwargs)


def on_device(value: Any, device: Any) -> Any:
    """A value in which all tensors are on a device."""
    from torch import Tensor

    from penstock.ir import map_leaves

    return map_leaves(value, lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf)


def source_of(target: str) -> Path:
    """The file that a model is built from."""
    return Path(target.removeprefix(HF) if target.startswith(HF) else target.rpartition(":")[0])


def _as_built_model(returned: Any, name: str) -> BuiltModel:
    """Accepts (model, args, kwargs), (model, args), or a model with one example: a tensor, tuple or mapping."""
    from torch import nn

    model, *rest = returned if isinstance(returned, tuple | list) and returned else (returned,)
    if not isinstance(model, nn.Module) or len(rest) > 2:
        got = f"{type(model).__name__} and {len(rest)} more" if rest else type(model).__name__
        raise PenstockError("the function must return a model and its batch", function=name, got=got, hint=_BODY)
    if len(rest) == 2:
        args, kwargs = rest
        if not isinstance(args, tuple | list) or not isinstance(kwargs, Mapping):
            got = f"{type(args).__name__} and {type(kwargs).__name__}"
            raise PenstockError("args must be a tuple and kwargs a dict", function=name, got=got, hint=_BODY)
        return BuiltModel(model, tuple(args), dict(kwargs))
    example = rest[0] if rest else ()
    if isinstance(example, Mapping):
        return BuiltModel(model, (), dict(example))
    return BuiltModel(model, tuple(example) if isinstance(example, tuple | list) else (example,), {})
