"""Definitions that every generated file contains besides its stages: their source is copied as it is here."""

import inspect
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

TRAINING = True
HOME = "cpu"


class Part(nn.Module):
    """Some modules, parameters and buffers of a model, under their original names."""

    def __getitem__(self, path: int | str) -> Any:
        """The part at an index, or at a path that cannot be written with attributes."""
        part: Any = self
        for name in str(path).split("."):
            held = (part._modules, part._parameters, part._buffers, vars(part))
            part = next(parts[name] for parts in held if name in parts)
        return part

    def take(self, model: nn.Module, path: str) -> None:
        """Register the module, parameter or buffer at a path of the model, not a copy, at the same path here."""
        *parents, name = path.split(".")
        branch: Any = self
        owner = model
        for parent in parents:
            branch = branch._modules.setdefault(parent, Part())
            owner = owner.get_submodule(parent)
        for kind in ("_modules", "_parameters", "_buffers", "__dict__"):
            if name in getattr(owner, kind):
                getattr(branch, kind)[name] = getattr(owner, kind)[name]
        branch._non_persistent_buffers_set |= owner._non_persistent_buffers_set & {name}


class Stage(Part):
    """A stage of a model: it shares its parts with the model, and its state dict has the keys of the model."""

    PARTS: ClassVar[tuple[str, ...]]
    TAKES: ClassVar[dict[str, tuple[torch.dtype, tuple[int | None, ...]]]]
    RECEIVES: ClassVar[dict[str, int]]
    SENDS: ClassVar[dict[str, tuple[int, ...]]]

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for path in self.PARTS:
            self.take(model, path)
        self.training = model.training

    @property
    def device(self) -> torch.device:
        return next((tensor.device for tensor in (*self.parameters(), *self.buffers())), torch.device(HOME))

    def check(self, **values: Tensor) -> None:
        """Raise ValueError for a mode, dtype or size other than the recorded one; None is any size."""
        expect(self.training, TRAINING, "training")
        for name, value in values.items():
            dtype, sizes = self.TAKES[name]
            expect(value.dtype, dtype, f"the type of {name}")
            if len(sizes) != value.dim() or any(s not in (None, n) for s, n in zip(sizes, value.shape, strict=True)):
                expect(tuple(value.shape), sizes, f"the size of {name}")


def expect(found: object, recorded: object, what: str) -> None:
    """Raise ValueError if a value differs from the one that was recorded, as the model might then run differently."""
    if type(found) is not type(recorded) or (found != recorded and repr(found) != repr(recorded)):
        raise ValueError(f"{what} must be {recorded!r} as recorded, got {found!r}: generate the stages again")


def with_attributes(kind: type, attributes: dict[str, Any]) -> Any:
    """An object of a class, with these attributes."""
    thing = kind.__new__(kind)
    for name, value in attributes.items():
        object.__setattr__(thing, name, value)
    return thing


def with_arguments(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a function that changes its arguments, and the arguments after the call."""
    return function(*args, **kwargs), args, kwargs


def arguments(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of the model that differ from their defaults, by name."""
    signature = inspect.signature(model.forward)
    given = dict(signature.bind(*args, **kwargs).arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given |= given.pop(parameter.name, {})
        elif parameter.name in given:
            value, default = given[parameter.name], parameter.default
            is_plain = type(value) is type(default) and isinstance(value, bool | int | float | str)
            if value is default or (is_plain and value == default):
                del given[parameter.name]
    return given


def constants(name: str, digest: str) -> dict[str, Tensor]:
    """The tensors in the file beside this one; raises ValueError if its content has changed since both were written."""
    import hashlib
    from pathlib import Path

    from safetensors.torch import load

    content = Path(__file__).with_name(name).read_bytes()
    expect(hashlib.sha256(content).hexdigest(), digest, f"the content of {name}")
    return load(content)
