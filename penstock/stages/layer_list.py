"""A model given as a list of modules and functions that are called one after another."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from penstock.errors import PartitionError
from penstock.ir import did_you_mean
from penstock.stages.stage import register_by_name

Entry = str | nn.Module | Callable[..., Any]
_LISTS = (nn.Sequential, nn.ModuleList)


class LayerList(nn.Module):
    """Each entry is the name of a module of the model, a module, or a function; a list of modules is its elements.

    Parameters keep the names that they have in the model; a module from outside the model is named by its index.
    """

    def __init__(self, model: nn.Module, entries: Iterable[Entry]) -> None:
        super().__init__()
        if isinstance(entries, str):
            raise PartitionError("entries must be a list", got=repr(entries), hint=f"[{entries!r}]")
        self.layer_functions: list[tuple[str, Callable[..., Any]]] = []
        """each with its name; functions have none"""
        names = {id(module): name for name, module in model.named_modules()}
        for entry in entries:
            layer = _resolve_entry(model, entry)
            for each in layer if isinstance(layer, _LISTS) else (layer,):
                name = ""
                if isinstance(each, nn.Module):
                    name = names.get(id(each), f"entry{len(self.layer_functions)}")
                    if id(each) in names:
                        register_by_name(self, model, [name], ())
                    else:
                        self.add_module(name, each)
                self.layer_functions.append((name, each))
        if not self.layer_functions:
            raise PartitionError("entries must not be empty", hint="the names of modules, in the order of their calls")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the modules, in order; functions have none."""
        return tuple(name for name, _ in self.layer_functions if name)

    def forward(self, x: Any) -> Any:
        """Call every entry on the result of the previous one."""
        for name, layer in self.layer_functions:
            x = self.get_submodule(name)(x) if name else layer(x)
        return x


def _resolve_entry(model: nn.Module, entry: Entry) -> Callable[..., Any]:
    if not isinstance(entry, str):
        if not callable(entry):
            hint = "the name of a module, the module itself, or a function of one value"
            raise PartitionError("an entry must be a name, a module or a function", got=repr(entry), hint=hint)
        return entry
    known = dict(model.named_modules())
    if entry not in known:
        raise PartitionError("no such module", name=repr(entry), hint=did_you_mean(entry, known))
    return known[entry]
