"""FAMILY: traces -> something to look at, one way of looking per file."""

from typing import Any

from penstock.errors import ViewError
from penstock.views.base import RichView, Traces, View
from penstock.views.chrome import Chrome
from penstock.views.compare import Compare
from penstock.views.grid import Grid
from penstock.views.memory import Memory
from penstock.views.memory_png import MemoryPng
from penstock.views.png import Png
from penstock.views.svg import Svg
from penstock.views.table import Table
from penstock.views.terminal import Terminal

VIEWS: dict[str, type[View[Any]]] = {
    "grid": Grid,
    "terminal": Terminal,
    "svg": Svg,
    "png": Png,
    "chrome": Chrome,
    "memory": Memory,
    "memory_png": MemoryPng,
    "compare": Compare,
    "table": Table,
}

__all__ = ["VIEWS", "RichView", "Traces", "View", "find"]


def find(name: str) -> type[View[Any]]:
    """The member of that name; case and punctuation do not matter."""
    plain = str(name).lower().replace("-", "_").replace(" ", "_")
    if plain not in VIEWS:
        raise ViewError("unknown view", name=repr(name), hint=f"one of {', '.join(VIEWS)}")
    return VIEWS[plain]
