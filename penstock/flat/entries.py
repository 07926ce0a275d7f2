"""Entries: a model written down as a list of modules that are called one after another."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from penstock.stages import Flat

Entry = str | nn.Module | Callable[..., Any]


class Function(nn.Module):
    """A function in a list of modules."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *values: Any) -> Any:
        """What the function returns."""
        return self.function(*values)

    def extra_repr(self) -> str:
        """The name of the function."""
        return getattr(self.function, "__qualname__", repr(self.function))


def flatten_model(
    model: nn.Module, layer_list: Iterable[Entry], return_list: bool = False
) -> nn.Sequential | list[nn.Module]:
    """The model as the modules that it calls one after another: a Sequential, or a list.

    An entry is a name of a module of the model, a module, or a function. Sequential and ModuleList are their elements.
    """
    steps = [step for _, step in Flat(model, layer_list).steps]
    modules = [step if isinstance(step, nn.Module) else Function(step) for step in steps]
    return modules if return_list else nn.Sequential(*modules)
