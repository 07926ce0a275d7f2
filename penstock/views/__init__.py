"""FAMILY: a noun -> something to look at, one way of looking per file; `noun` says which it draws."""

from typing import Any

from penstock.errors import ViewError
from penstock.views.base import RichView, Staged, Subject, Traces, View
from penstock.views.chrome import Chrome
from penstock.views.compare import Compare
from penstock.views.cuts import Cuts
from penstock.views.foreign import FOREIGN, check_can_run, module_lists
from penstock.views.grid import Grid
from penstock.views.memory import Memory
from penstock.views.memory_png import MemoryPng
from penstock.views.model import Model
from penstock.views.outline import Outline
from penstock.views.page.contents import Advice, Contents
from penstock.views.png import Png
from penstock.views.profile import Profile
from penstock.views.report import Report
from penstock.views.sheet import Sheet
from penstock.views.summary import summary
from penstock.views.svg import Svg
from penstock.views.table import Table
from penstock.views.terminal import Terminal

VIEWS: dict[str, type[View[Any, Any]]] = {
    "grid": Grid,
    "terminal": Terminal,
    "svg": Svg,
    "png": Png,
    "chrome": Chrome,
    "memory": Memory,
    "memory_png": MemoryPng,
    "compare": Compare,
    "table": Table,
    "model": Model,
    "outline": Outline,
    "cuts": Cuts,
    "profile": Profile,
    "report": Report,
}

__all__ = [
    "FOREIGN",
    "VIEWS",
    "Advice",
    "Chrome",
    "Contents",
    "Cuts",
    "Memory",
    "Model",
    "Outline",
    "Png",
    "Profile",
    "Report",
    "RichView",
    "Sheet",
    "Staged",
    "Subject",
    "Svg",
    "Table",
    "Terminal",
    "Traces",
    "View",
    "check_can_run",
    "find",
    "module_lists",
    "summary",
]


def find(name: str) -> type[View[Any, Any]]:
    """The member of that name; case and punctuation do not matter."""
    plain = str(name).lower().replace("-", "_").replace(" ", "_")
    if plain not in VIEWS:
        raise ViewError("unknown view", name=repr(name), hint=f"one of {', '.join(VIEWS)}")
    return VIEWS[plain]
