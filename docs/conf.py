"""How Sphinx builds the documentation; `make docs` turns its warnings into errors."""

import dataclasses
import sys
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from describe import field_texts

project = "penstock"
copyright = "the penstock contributors"  # noqa: A001 - the name that Sphinx reads
version = release = installed_version("penstock")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# In docstrings a single backtick is code, as in Markdown.
default_role = "literal"

html_extra_path = ["llms.txt"]
html_theme = "furo"
html_title = f"penstock {version}"


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _mark_grids)
    # Before napoleon, which turns the section into a list.
    app.connect("autodoc-process-docstring", _add_fields, priority=400)


def _mark_grids(app: Any, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Grids in docstrings are plain indented text, as a reader of the source likes it; Sphinx wants a second colon."""
    for number, line in enumerate(lines[:-2]):
        if line.endswith(":") and not lines[number + 1] and lines[number + 2].startswith("    "):
            lines[number] = f"{line}:"


def _add_fields(app: Any, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """List the fields of a record as the parameters of its constructor."""
    if what == "class" and dataclasses.is_dataclass(obj):
        fields = {field.name for field in dataclasses.fields(obj) if field.init}
        texts = {field: text for field, text in field_texts(obj).items() if field in fields}
        if texts:
            lines += ["", "Args:", *(f"    {field}: {text}" for field, text in texts.items()), ""]
