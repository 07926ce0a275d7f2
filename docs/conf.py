"""How Sphinx builds the documentation; `make docs` turns its warnings into errors."""

from importlib.metadata import version as installed_version
from typing import Any

project = "penstock"
copyright = "the penstock contributors"  # noqa: A001 - the name that Sphinx reads
version = release = installed_version("penstock")

extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# In docstrings a single backtick is code, as in Markdown.
default_role = "literal"

html_theme = "furo"
html_title = f"penstock {version}"


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _mark_grids)


def _mark_grids(app: Any, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Grids in docstrings are plain indented text, as a reader of the source likes it; Sphinx wants a second colon."""
    for number, line in enumerate(lines[:-2]):
        if line.endswith(":") and lines[number + 2].startswith("    "):
            lines[number] = f"{line}:"
