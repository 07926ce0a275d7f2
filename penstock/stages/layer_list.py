"""A model given as a list of modules and functions that are called one after another."""

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any

from torch import nn

from penstock.errors import PartitionError
from penstock.stages.stage import add_parts

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
        self.steps: list[tuple[str, Callable[..., Any]]] = []
        names = {id(module): name for name, module in model.named_modules()}
        for entry in entries:
            step = _resolve_entry(model, entry)
            for element in step if isinstance(step, _LISTS) else (step,):
                self._add(model, element, names)
        if not self.steps:
            raise PartitionError("entries must not be empty")

    def _add(self, model: nn.Module, step: Callable[..., Any], names: dict[int, str]) -> None:
        if not isinstance(step, nn.Module):
            self.steps.append(("", step))
            return
        name = names.get(id(step), f"entry{len(self.steps)}")
        if id(step) in names:
            add_parts(self, model, [name], ())
        else:
            self.add_module(name, step)
        self.steps.append((name, step))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the modules, in order; functions have none."""
        return tuple(name for name, _ in self.steps if name)

    def forward(self, x: Any) -> Any:
        """Call every entry on the result of the previous one."""
        for name, step in self.steps:
            x = self.get_submodule(name)(x) if name else step(x)
        return x


def _resolve_entry(model: nn.Module, entry: Entry) -> Callable[..., Any]:
    if not isinstance(entry, str):
        if not callable(entry):
            raise PartitionError("an entry must be a name, a module or a function", entry=repr(entry))
        return entry
    known = dict(model.named_modules())
    if entry not in known:
        close = get_close_matches(entry, list(known), n=1)
        raise PartitionError("no such module", name=repr(entry), hint=f"did you mean {close[0]!r}" if close else "")
    module: nn.Module = known[entry]
    return module
