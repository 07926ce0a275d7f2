"""Imports: where classes and functions can be imported from, and the lines that do so."""

import sys
from typing import Any

from penstock.codegen.names import Names, is_plain


class Imports:
    """The expressions for things of other modules, and the imports that these need."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._known: dict[tuple[str, str], str] = {}

    def code(self, thing: Any) -> str | None:
        """The expression for a class or function; None if it cannot be had by the name that it goes by."""
        module = str(getattr(thing, "__module__", None) or "builtins")
        return self.found(module, str(getattr(thing, "__qualname__", "")), thing)

    def found(self, module: str, path: str, thing: Any) -> str | None:
        """The expression for a thing if it is what a module has at a path."""
        if not same(_found(module, path), thing):
            return None
        if module in ("torch", "builtins"):
            return f"torch.{path}" if module == "torch" else path
        first, dot, rest = path.partition(".")
        if (module, first) not in self._known:
            self._known[module, first] = self._names.fresh(first, is_input=True)
        return f"{self._known[module, first]}{dot}{rest}"

    @property
    def lines(self) -> list[str]:
        """The statements, in the order of the modules."""
        found: dict[str, list[str]] = {}
        for (module, name), known in sorted(self._known.items()):
            found.setdefault(module, []).append(name if name == known else f"{name} as {known}")
        return [f"from {module} import {', '.join(names)}" for module, names in found.items()]


def _found(module: str, path: str) -> Any:
    """What a module that is loaded has at a path; names that are more than names find nothing."""
    if not all(map(is_plain, (*module.split("."), *path.split(".")))):
        return None
    return walked(sys.modules.get(module), path)


def walked(thing: Any, path: str) -> Any:
    """What is found at a dotted path from here; None if nothing is."""
    for word in path.split("."):
        thing = getattr(thing, word, None)
    return thing


def same(one: Any, other: Any) -> bool:
    """Whether two are one thing; methods of one object are made anew each time that they are looked at."""
    if one is other:
        return one is not None
    return type(one) is type(other) and callable(one) and hasattr(one, "__self__") and bool(one == other)
