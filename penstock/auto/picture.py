"""Picture: the order of a schedule drawn into a PNG, SVG or HTML file, every pass alike long."""

from collections.abc import Callable
from pathlib import Path

from jinja2 import Environment
from markupsafe import Markup

from penstock.api.planning import simulate
from penstock.errors import ViewError
from penstock.ir import Schedule, Trace, write_atomic
from penstock.views import Timeline

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>body { margin: 2rem; font-family: sans-serif; } svg { max-width: 100%; height: auto; background: white; }</style>
</head>
<body>
{{ picture }}
</body>
</html>
"""


def draw(schedule: Schedule, name: str, path: str | Path) -> None:
    """Write the picture into the file, in the format that its name ends with."""
    suffix = Path(path).suffix.lower()
    if suffix not in _FORMATS:
        raise ViewError("a picture of this kind cannot be drawn", file=str(path), hint=", ".join(_FORMATS))
    document = _FORMATS[suffix](simulate(schedule), name)
    write_atomic(path, document)  # all ranks may write the same file at once


def _page(trace: Trace, name: str) -> str:
    template = Environment(autoescape=True).from_string(_PAGE)
    # The view has escaped what it draws.
    return template.render(title=name, picture=Markup(Timeline()({name: trace})))


_FORMATS: dict[str, Callable[[Trace, str], str | bytes]] = {
    ".png": lambda trace, name: Timeline(format="png")({name: trace}),
    ".svg": lambda trace, name: Timeline()({name: trace}),
    ".html": _page,
}
